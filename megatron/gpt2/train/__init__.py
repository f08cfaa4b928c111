"""A training run. Reading order:

loop                the training loop
train_step          one update of the model
forward_backward    forward and backward passes, in the order of the pipeline schedule
data                batches on the device, and a check that all ranks of a group read the same
evaluate            the loss over a split, and a sample of text

setup               what each rank decides by itself: checkpoint, device, precision, tokenizer, data
train_state         model, buffers and optimizer
trainer             Trainer: the parts of a run
checkpointing       saving and loading
resume_equivalence  whether a resumed run is equal to the run that it continues
start_and_end       the start and the end of a process: its ranks, what it prints, its exit code
not_finite          finds the first tensor that is not finite
"""
