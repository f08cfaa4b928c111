"""Preprocessing: files of text to Megatron's .bin/.idx pairs, by several processes, restartable.

preprocess         a whole run: plan, shards, merge, report
inputs             which part of which file goes into which shard, and what stands in it
shards             shards, by several processes: input in, a pair for each JSON key out
merging            several token files into one pair
document_lengths   how long documents are: numbers, bars of text, a plot
"""
