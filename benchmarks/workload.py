"""The workloads of the training benchmarks by preset and part, and the compared programs and settings (arms)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from data_utils.indexed_dataset import IndexedDatasetBuilder, token_dtype
from megatron.gpt2.config import ModelConfig

MODELS = {"124M": (12, 768, 12), "345M": (24, 1024, 16), "774M": (36, 1280, 20), "1.5B": (48, 1600, 25)}
# {part of benchmarks/gpu.sh: (model, b, micro-batches)}. Part 1 is benchmarks/gpu_first_minutes.py.
PARTS = {2: ("345M", 32, 1), 3: ("774M", 16, 2), 4: ("1.5B", 16, 2), 5: ("345M", 32, 1)}
LR, WEIGHT_DECAY, BETAS, CLIP_GRAD, SEED = 1e-4, 0.1, (0.9, 0.95), 1.0, 1234
TOKENS = 1 << 22  # the largest number of tokens in the file; arms that need more tokens read the file again
PEAK_FLOPS = 989e12  # dense bf16 FLOP/s, from the datasheet of H100 SXM and H200


@dataclass(frozen=True)
class Workload:
    """The training task that all compared programs (arms) run.

    scratch: a temporary folder.
    compiler: the backend of torch.compile.
    """

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    seq_length: int
    micro_batch_size: int
    accumulation: int = 1
    vocab_size: int = 50257
    dropout: float = 0.0
    device: str = "cpu"
    scratch: str = ""
    compiler: str = "inductor"

    @property
    def model(self) -> ModelConfig:
        return ModelConfig(
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            gelu="erf",  # nanoGPT has only the erf form of GELU.
            num_attention_heads=self.num_attention_heads,
            max_position_embeddings=self.seq_length,
            vocab_size=self.vocab_size,
            attention_dropout=self.dropout,
            hidden_dropout=self.dropout,
        )

    @property
    def tokens(self) -> str:
        """The prefix of the .bin/.idx pair of tokens, uint16."""
        return f"{self.scratch}/tokens"

    def small(self) -> Workload:
        """Return a smoke test's version: a tiny model, and a compiler that does not generate code."""
        tiny: dict[str, Any] = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 8, "seq_length": 64}
        return replace(self, **tiny, micro_batch_size=2, vocab_size=500, compiler="eager")

    def write_tokens(self, samples: int) -> None:
        """Write random tokens for all arms, with p(id) ∝ 1/(id + 1), and a small .bin/.idx pair of bytes to prepare
        our run."""
        draw = np.random.default_rng(SEED)
        count = min(samples * self.seq_length + 1, TOKENS)
        for prefix, size, length in (
            (self.tokens, self.vocab_size, count),
            (f"{self.scratch}/bytes", 256, self.seq_length + 1),
        ):
            with IndexedDatasetBuilder(prefix, token_dtype(size)) as builder:
                builder.add((np.exp(draw.random(length) * np.log(size + 1)) - 1).astype(np.int64).clip(0, size - 1))
                builder.end_document()


@dataclass(frozen=True)
class Arm:
    """One program with one configuration.

    shipped: nanoGPT's defaults on a CPU (fp32, no autocast, no fused AdamW, default allocator).
    flags: further flags of our program.
    changes: fields of the workload that differ for this arm.
    kind: ours, rank (one rank of ours, with tensor-parallel size `ranks`), huggingface or nanogpt.
    """

    name: str
    kind: str = "ours"
    compiled: bool = False
    precision: str = "bf16"
    shipped: bool = False
    flags: tuple[str, ...] = ()
    changes: dict[str, Any] = field(default_factory=dict)
    ranks: int = 1
    note: str = ""


COMPILED = Arm("ours compiled", compiled=True)
SELECTIVE, FULL = (("--recompute-granularity", name) for name in ("selective", "full"))
ARMS = [  # The most important programs (arms) are first, because the last programs are skipped if the time is short.
    COMPILED,
    Arm("nanoGPT compiled", "nanogpt", compiled=True),
    Arm("HF compiled", "huggingface", compiled=True),
    Arm("ours eager"),
    Arm("ours selective", flags=SELECTIVE),
    Arm("HF eager", "huggingface"),
    Arm("nanoGPT eager", "nanogpt"),
    Arm("nanoGPT as shipped", "nanogpt", precision="fp32", shipped=True),
]
SHAPE_8_3B = {"num_layers": 72, "hidden_size": 3072, "num_attention_heads": 32, "micro_batch_size": 8}
RANK = Arm(
    "ours 1 of 8 ranks of 8.3B",
    "rank",
    compiled=True,
    ranks=8,
    changes=SHAPE_8_3B,
    note="empty initial weights; communication excluded: collectives of a fake process group move nothing",
)
OURS_ONLY_ARMS = [
    COMPILED,
    replace(COMPILED, name="ours dropout 0.1", changes={"dropout": 0.1}),
    replace(COMPILED, name="ours recompute full", flags=FULL),
    replace(COMPILED, name="ours recompute selective", flags=SELECTIVE),
    Arm(
        "ours fp16 as in 2019",
        precision="fp16",
        flags=("--checkpoint-activations", "--loss-scale", "1024"),
        changes={"dropout": 0.1, "micro_batch_size": 8, "accumulation": 1},
        note="b 8, dropout 0.1, every layer recomputed, eager; the published run of these settings: 6,785 MiB "
        "(7.11 GB) allocated after 100 iterations, 11,927 MiB (12.51 GB) at the peak",
    ),
    RANK,
    replace(RANK, name=f"{RANK.name} eager", compiled=False),
]
