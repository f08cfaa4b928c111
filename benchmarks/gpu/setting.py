"""What the stages of `benchmarks/first_minutes.py` measure: GPT-2's models on a GPU, or tiny ones on a CPU, which shows
that a stage runs and whose figures mean nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.problem import MODELS, SMOKE_COMPILER, Problem
from benchmarks.train import write_tokens
from megatron.gpt2.config import ModelConfig


@dataclass(frozen=True)
class Setting:
    """smoke: tiny models on the CPU. scratch: a folder for what nobody keeps."""

    smoke: bool
    scratch: str

    @property
    def device(self) -> torch.device:
        """The device of every stage."""
        return torch.device("cpu" if self.smoke else "cuda")

    @property
    def names(self) -> tuple[str, ...]:
        """The models."""
        return ("345M",) if self.smoke else ("345M", "774M", "1.5B")

    @property
    def repeats(self) -> int:
        """Calls that are timed, of each operation."""
        return 1 if self.smoke else 20

    @property
    def tokens(self) -> tuple[int, ...]:
        """Tokens of a micro-batch, for the tables."""
        return (32,) if self.smoke else (8192, 16384, 32768)

    def problem(self, name: str, micro_batch_size: int, accumulation: int = 1, **changes: Any) -> Problem:
        """A training problem of the model `name`, with the tokens that it reads. changes: other fields of it."""
        layers, hidden, heads = (2, 64, 4) if self.smoke else MODELS[name]
        shape: dict[str, Any] = {
            "num_layers": layers,
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "seq_length": 1024,
            "micro_batch_size": micro_batch_size,
            "accumulation": accumulation,
            "device": self.device.type,
            "scratch": self.scratch,
            "tokens": f"{self.scratch}/tokens",
            **changes,
        }
        if self.smoke:
            shape |= {
                "num_layers": 2,
                "seq_length": 32,
                "micro_batch_size": 2,
                "vocab_size": 300,
                "compiler": SMOKE_COMPILER,
            }
        problem = Problem(**shape)
        write_tokens(problem, 16 * problem.micro_batch_size * problem.accumulation)
        return problem

    def model(self, name: str) -> ModelConfig:
        """The shape of the model `name`, without dropout."""
        layers, hidden, heads = (2, 64, 4) if self.smoke else MODELS[name]
        s, vocab_size = (32, 300) if self.smoke else (1024, 50257)
        return ModelConfig(
            num_layers=layers,
            hidden_size=hidden,
            num_attention_heads=heads,
            vocab_size=vocab_size,
            max_position_embeddings=s,
            attention_dropout=0.0,
            hidden_dropout=0.0,
        )
