"""A training run, in the order of reading:

prepare         what each rank finds out alone: flags, checkpoint, device, precision, tokenizer, data
build           then together: groups, model, optimizer, data, log
train_step      one update
evaluate        the loss over a split, and a sample of text
loop            training, with evaluations, checkpoints, and when to stop

run             Run: what these share, which consists of
engine          the model and what updates it
data            batches on the device, and that the ranks of a group read the same
checkpointing   saving and loading
progress, log_lines    how far the run is, and what it prints
report          what a person sees at the start and at the end
differences     what continues in another way than in the checkpoint
collectives     numbers that ranks share
"""
