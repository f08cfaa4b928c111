"""Web text: from a list of addresses, or a folder of scraped text, to a corpus to train on.

    shards            a shard of documents in -> outputs and a manifest out, whole or not at all, restartable
    stages            a stage over all its shards: flags, processes, a cluster, progress, the closing report
    filters, download, near_duplicates
                      the work of the stages on one shard
    commands          the programs of tools/openwebtext

Libraries beyond numpy come with the extra [curate] and are imported where they are used.
"""
