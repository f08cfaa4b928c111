"""Preprocessing: files of text to Megatron's .bin/.idx pairs, by several processes, restartable.

preprocess  a whole run: shards, and the merge; and several token files into one pair
inputs      which part of which file goes into which shard, and its documents
"""
