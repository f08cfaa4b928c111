"""Preprocessing: files of text to Megatron's .bin/.idx pairs, by several processes, restartable.

preprocess  a whole run: plan, shards, merge; and several token files into one pair
inputs      which part of which file goes into which shard, and its documents
shards      shards, by several processes: input in, a pair for each JSON key out
lengths     how long documents are: numbers, bars of text, a plot
"""
