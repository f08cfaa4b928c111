"""Curation of web text: from a list of addresses, or a folder of scraped text, to a corpus to train on.

    documents         what a stage reads: files, folders and globs, as shards of documents
    shard_run         the contract of every stage: shard in -> shard and manifest out, whole or not at all, restartable
    stages            a stage over all its shards: processes, a cluster, progress, the closing report
    command_line      what the programs of tools/openwebtext share
    urls, fetching, download, cleanup, decontamination, splitting
                      the work of each stage on one shard
    minhash, near_duplicates
                      signatures of documents, and the pairs and groups of near-duplicates that they lead to

Libraries beyond numpy come with the extra [curate] and are imported where they are used.
"""
