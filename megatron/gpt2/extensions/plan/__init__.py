"""The memory of a run, from its flags alone, in the order of reading:

sizes       what memory depends on, and the large tensors of a rank
pipelines   what a rank of a pipeline holds beside the action that it does
step        the moments of a training step, of which the fullest is expected
fit         the layouts of a run that fit a given memory, the cheapest first
hook        what a training run says of its memory
command     tools/plan.py, and the memory of Megatron-LM's first release
"""
