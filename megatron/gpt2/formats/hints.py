"""What a user adds to a checkpoint that does not say everything."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Hints:
    """What a source may not say by itself; each is a flag of tools/checkpoint.py. None: not given."""

    num_attention_heads: int | None = None
    vocab_size: int | None = None  # true, without padding
    gelu: str | None = None
    iteration: int | None = None  # which one of a folder that holds several
