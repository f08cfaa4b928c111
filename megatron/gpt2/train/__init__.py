"""A training run. Reading order:

train_step          one update of the model
trainer             Trainer: the parts of a run
train_state         model, buffers and optimizer
forward_backward    forward and backward passes, in the order of the pipeline schedule

data                batches on the device, and a check that model-parallel ranks read the same text
checkpointing       saving and loading

setup               what each rank decides by itself: checkpoint, device, precision, tokenizer, data
loop                the training loop

evaluate            the loss over a split, and a sample of text
start_and_end       the start and the end of a process: joining the other ranks, the start table, the report
resume_equivalence  whether a resumed run is equal to the run that it continues
not_finite          finds the first tensor that is not finite
"""
