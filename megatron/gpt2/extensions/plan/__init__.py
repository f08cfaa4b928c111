"""Estimate the memory of a run from its flags. The modules in reading order:

sizes       the inputs of an estimate, and the sizes of the large tensors of a rank
pipelines   what a rank of a pipeline stores during each action of the schedule
step        the moments of a training step; the estimate is the one with the most memory
fit         the layouts of a run that fit into a given memory, the cheapest first
hook        what a training run prints about its memory
command     tools/plan.py, and the memory of Megatron-LM's first release
"""
