"""How fast a machine multiplies the matrices of a model at best: what MFU refers to where no datasheet says.

Legend: h hidden.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import mpu
from benchmarks.problem import Problem
from megatron.gpt2.device import DTYPES


@torch.no_grad()
def ceiling(problem: Problem, precision: str, seconds: float) -> dict[str, Any]:
    """FLOP/s of this model's own matrix products: forward, input gradient and weight gradient of each linear and of the
    head, each at its best, weighted by FLOPs. `seconds` of repetitions for each product."""
    device, dtype, h = torch.device(problem.device), DTYPES[precision], problem.hidden_size
    m = problem.micro_batch_size * problem.seq_length
    padded = mpu.padded_vocab_size(problem.vocab_size, problem.model.make_vocab_size_divisible_by, 1)
    shapes = {
        "query_key_value": (3 * h, h),
        "dense": (h, h),
        "h_to_4h": (4 * h, h),
        "4h_to_h": (h, 4 * h),
        "head": (padded, h),
    }
    flops = total = 0.0
    rates = {}
    for name, (n, k) in shapes.items():
        x, w, g = (torch.randn(*shape, device=device).to(dtype) for shape in ((m, k), (n, k), (m, n)))
        took = sum(
            fastest(product, device, seconds)
            for product in (lambda x=x, w=w: F.linear(x, w), lambda g=g, w=w: g @ w, lambda g=g, x=x: g.t() @ x)
        )
        count = 1 if name == "head" else problem.num_layers
        flops += 6.0 * m * n * k * count
        total += took * count
        rates[name] = 6.0 * m * n * k / took
    return {"flops_per_s": flops / total, "precision": precision, "linears": rates, "threads": torch.get_num_threads()}


def fastest(product: Callable[[], Any], device: torch.device, seconds: float) -> float:
    """The least time of a call in seconds, over at least five calls."""
    times: list[float] = []
    product()
    end = time.perf_counter() + seconds
    while len(times) < 5 or time.perf_counter() < end:
        start = time.perf_counter()
        product()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times)
