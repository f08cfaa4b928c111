"""The versions of all that this project writes to disk and reads again, in one place.

| what | where | version | older ones | one of another version |
|---|---|---|---|---|
| a checkpoint | iter_0000300/manifest.json, "version" | 2 | 1 is read | is an error that says to update |
| a run's settings | config.json of a save folder, "version" | 1 | none | is an error of --config |
| a pair's index | PREFIX.idx, after its magic; Megatron's format | 1 | none | is an error |
| a pair's manifest | PREFIX.json, "format" | 1 | none | the version is for readers to come |
| a shard of a pair | PREFIX.shards/, within "recipe" | 1 | none | the shard is made again |
| tokenised text | the cache folder, within a pair's name | 1 | none | the text is tokenised again |
| a stage's manifest | OUTPUT/manifests/NAME.json, "format" | 1 | none | the shard is made again |

A tokenizer's folder has no version: its facts name its kind and hash, and a kind's files keep their form. Folders from
before these facts were called tokenizer_facts.json have them as tokenizer.json, which is read as well.
A change of a format that older programs cannot read raises its version here, and the table says what becomes of the
older ones.
"""

CHECKPOINT_VERSION = 2
OLDEST_CHECKPOINT_VERSION = 1  # the oldest that is still read
RUN_SETTINGS_VERSION = 1
INDEX_VERSION = 1
PAIR_MANIFEST_VERSION = 1
PREPROCESSING_SHARD_VERSION = 1
TOKEN_CACHE_VERSION = 1
STAGE_MANIFEST_VERSION = 1
