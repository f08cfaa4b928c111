"""Plan a run from its flags. The modules in reading order:

process_group  groups of any size that send nothing
trace          runs the program's step for one rank on tensors without data, and records what it does
memory         the memory of a rank by part, from a trace
cluster        a described cluster, and the time of kernels and collectives on it
simulate       the time of a step, from traces
search         the layouts of a run that fit into a given memory, and the fastest of them
hook           what a training run prints about its memory
command        tools/plan.py, and the memory of Megatron-LM's first release
bench_kernels  tools/bench_kernels.py, which measures a machine and describes it as a cluster
show_step      tools/show_step.py
"""
