"""What a user says about a checkpoint that does not say it itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Hints:
    """Facts that a source may not hold, each a flag of tools/checkpoint.py. None: not given."""

    num_attention_heads: int | None = None
    vocab_size: int | None = None  # true, without padding
    gelu: str | None = None
    iteration: int | None = None  # which one of a folder that holds several
