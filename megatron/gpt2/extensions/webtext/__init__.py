"""Web text: make a training corpus from a list of URLs or a folder of scraped text.

    shards            run a stage on one shard of documents: atomic outputs and a manifest, restartable
    stages            run a stage on all shards: flags, processes, a cluster, progress, the final report
    filters, download, near_duplicates
                      the work of each stage on one shard
    commands          the programs of tools/openwebtext

The extra [curate] installs the libraries beyond numpy. The libraries are imported when they are used.
"""
