"""Preprocessing: files of text to Megatron's .bin/.idx pairs, by several processes, restartable.

    preprocess         a whole run: plan, pool, merge, report
    plan               which part of which file goes into which shard
    records            what stands in a file of input
    shards             one shard: input in, a pair for each JSON key out
    pool               many shards by several processes
    merging            several token files into one pair
    document_lengths   how long documents are: numbers, bars of text, a plot
"""
