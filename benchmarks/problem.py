"""What `benchmarks/train.py` compares: the problems by preset and part, and the arms that solve them.

Legend: b micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megatron.gpt2.config import ModelConfig


@dataclass(frozen=True)
class Problem:
    """What all arms compute. `tokens`: prefix of the .bin/.idx pair, uint16; `scratch`: a folder to write into.
    `compiler`: the backend of torch.compile; a smoke run takes one that writes no code, which would take a minute."""

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    seq_length: int
    micro_batch_size: int
    accumulation: int = 1
    vocab_size: int = 50257
    dropout: float = 0.0
    gelu: str = "erf"
    device: str = "cpu"
    lr: float = 1e-4
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    clip_grad: float = 1.0
    seed: int = 1234
    tokens: str = ""
    scratch: str = ""
    compiler: str = "inductor"

    @property
    def model(self) -> ModelConfig:
        return ModelConfig(
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            gelu=self.gelu,
            num_attention_heads=self.num_attention_heads,
            max_position_embeddings=self.seq_length,
            vocab_size=self.vocab_size,
            attention_dropout=self.dropout,
            hidden_dropout=self.dropout,
        )

    @property
    def tokens_per_step(self) -> int:
        return self.micro_batch_size * self.accumulation * self.seq_length


@dataclass(frozen=True)
class Arm:
    """Who computes it and how. `kind`: ours, rank (one of ours, at model-parallel size `ranks`), huggingface, nanogpt.

    shipped: nanoGPT's own settings of a CPU (fp32, no autocast, AdamW not fused, the allocator left alone).
    flags: further ones of our program. changes: fields of the problem that this arm sets otherwise.
    """

    name: str
    kind: str
    compiled: bool = False
    precision: str = "bf16"
    shipped: bool = False
    flags: tuple[str, ...] = ()
    changes: dict[str, Any] = field(default_factory=dict)
    ranks: int = 1
    note: str = ""


ARMS = [  # the most wanted first: where time runs short, the last are left out
    Arm("ours compiled", "ours", compiled=True),
    Arm("nanoGPT compiled", "nanogpt", compiled=True),
    Arm("HF compiled", "huggingface", compiled=True),
    Arm("ours eager", "ours"),
    Arm("ours selective", "ours", flags=("--recompute-granularity", "selective")),
    Arm("HF eager", "huggingface"),
    Arm("nanoGPT eager", "nanogpt"),
    Arm("nanoGPT as shipped", "nanogpt", precision="fp32", shipped=True),
]
SHAPE_8_3B = {"num_layers": 72, "hidden_size": 3072, "num_attention_heads": 32, "micro_batch_size": 8}
ALONE = [
    Arm("ours compiled", "ours", compiled=True),
    Arm("ours dropout 0.1", "ours", compiled=True, changes={"dropout": 0.1}),
    Arm("ours recompute full", "ours", compiled=True, flags=("--recompute-granularity", "full")),
    Arm("ours recompute selective", "ours", compiled=True, flags=("--recompute-granularity", "selective")),
    Arm(
        "ours fp16 as in 2019",
        "ours",
        precision="fp16",
        flags=("--checkpoint-activations", "--loss-scale", "1024"),
        changes={"dropout": 0.1, "micro_batch_size": 8, "accumulation": 1},
        note="b 8, dropout 0.1, every layer "
        "recomputed, eager; the published run of these settings: 6,785 MiB (7.11 GB) allocated after 100 iterations, "
        "11,927 MiB (12.51 GB) at the peak",
    ),
    *(
        Arm(
            f"ours 1 of 8 ranks of 8.3B{how}",
            "rank",
            compiled=not how,
            ranks=8,
            changes=SHAPE_8_3B,
            note="empty initial weights; communication excluded: collectives of a fake process group move nothing",
        )
        for how in ("", " eager")
    ),
]
SMOKE_COMPILER = "eager"
MODELS = {"124M": (12, 768, 12), "345M": (24, 1024, 16), "774M": (36, 1280, 20), "1.5B": (48, 1600, 25)}
# Of benchmarks/gpu.sh: model, b, micro-batches. Part 1 is benchmarks/first_minutes.py.
PARTS = {2: ("345M", 32, 1), 3: ("774M", 16, 2), 4: ("1.5B", 16, 2), 5: ("345M", 32, 1)}
