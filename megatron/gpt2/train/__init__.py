"""A training run, in the order of reading:

loop             training, with log lines, evaluations, checkpoints, and when to stop
train_step       one update
forward_backward    the passes of a step, in the order of a schedule
data             batches on the device, and that the ranks of a group read the same
evaluate         the loss over a split, and a sample of text

setup            what each rank decides by itself: flags, checkpoint, device, precision, tokenizer, data; and whether all agree
engine           the model and what updates it
run              Run: what all of these share, and how it is built
checkpointing    saving and loading
continuation     how a run goes on from a checkpoint: in the same way, or what differs
report           what a person sees at the start and at the end
not_finite       where numbers stop being finite
"""
