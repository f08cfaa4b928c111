"""Checkpoints of other programs, read as ours and written for them."""
