"""Web text: make a training corpus from a list of URLs or a folder of scraped text.

    step              run a step on one input: outputs that are complete or absent, a manifest, restarts
    runner            run a step on all inputs: flags, processes, a cluster, progress, the final report
    filters, download, near_duplicates
                      the work of each step on one input
    commands          the programs of tools/openwebtext

The extra [curate] installs the libraries beyond numpy. The libraries are imported when they are used.
"""
