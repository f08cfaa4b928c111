"""Plan a run from its flags. The modules in reading order:

trace       runs the program's step for one rank on tensors without data, and records what it does
memory      the memory of a rank by part, from a trace
fit         the layouts of a run that fit into a given memory, the cheapest first
hook        what a training run prints about its memory
command     tools/plan.py, and the memory of Megatron-LM's first release
"""
