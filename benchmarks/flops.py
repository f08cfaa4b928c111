"""The two ways in which the FLOPs of a training token are counted, and what others published by the second one.

Legend: N parameters, L layers, C hidden size, T sequence length: the names of llm.c.
"""

from __future__ import annotations

from typing import Any

PEAK = 989e12  # FLOP/s, dense bf16, of the datasheet of H100 SXM and H200

# Of other machines and not measured here: bf16, MFU by llm.c's own count.
LLM_C: list[dict[str, Any]] = [
    {"model": "1.5B", "gpus": "8 H100", "mfu": 0.486, "source": "llm.c, its run of GPT-2 1.56B"},
    {"model": "1.5B", "gpus": "8 H100", "tokens_per_s": [374e3, 388e3], "source": "llm.c, its scripts' step times"},
    {"model": "345M", "gpus": "8 A100", "tokens_per_s": [524288 / 0.820] * 2, "source": "llm.c, its scripts: 820 ms"},
]


def by_llm_c(parameters: int, num_layers: int, hidden_size: int, seq_length: int) -> int:
    """6N + 6LCT, as `gpt2_estimate_mfu` of llm.c has it. parameters: with the padded vocabulary. Megatron's formula is
    `ModelConfig.flops_per_token`: it counts attention twice as high, and no biases and norms."""
    return 6 * parameters + 6 * num_layers * hidden_size * seq_length


def utilisation(tokens_per_s: float, visit: dict[str, Any], peak: float | None) -> dict[str, float | None]:
    """The share of `peak` FLOP/s that the model's own arithmetic is, by both counts. visit: a result of
    `benchmarks/arms.py`."""
    return {
        name: tokens_per_s * visit[key] / peak if peak else None
        for name, key in (("mfu", "flops_per_token"), ("mfu_by_llm_c", "flops_per_token_llm_c"))
    }


def published(model: str) -> list[dict[str, Any]]:
    """What others published of this model: not measured here."""
    return [entry for entry in LLM_C if entry["model"] == model]
