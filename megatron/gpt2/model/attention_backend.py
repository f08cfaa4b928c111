"""Choose torch's attention kernel on a GPU: for training by timing the kernels on the run's shape; for inference
kernels that do not plan for each length.

On Hopper, torch's default is cuDNN's kernel, which is the fastest without dropout. With dropout it can be several times
slower than FlashAttention, so no fixed choice is right.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from mpu.kernels import causal_attention

# The kernels are in order of preference: a later one must be faster by MIN_SPEEDUP, so that two runs on one machine
# agree.
BACKENDS: dict[str, Callable[[bool], Any]] = {
    "flash": torch.backends.cuda.enable_flash_sdp,
    "fused": torch.backends.cuda.enable_cudnn_sdp,
    "efficient": torch.backends.cuda.enable_mem_efficient_sdp,
}
MIN_SPEEDUP = 1.05
REPEATS = 10


def choose_attention(
    requested: str, device: torch.device, dtype: torch.dtype, *, b: int, s: int, n: int, d: int, dropout_p: float
) -> str:
    """Enable one of torch's kernels for attention over [s, b, n, d] on this device. Return a log line with the kernel
    and the reason. On a CPU, nothing is changed and the line is empty.

    requested: the value of --attention-backend. torch's math implementation stays enabled for shapes that the kernel
    does not support. With torch's deterministic algorithms (which exclude cuDNN's kernel), the first kernel that
    supports the shape is chosen, because measured times differ between runs.
    """
    if device.type != "cuda":
        return ""
    if requested != "auto":
        _enable(requested)
        return f"attention: {requested}, by --attention-backend"
    times: dict[str, float] = {}
    deterministic = torch.are_deterministic_algorithms_enabled()
    for name in BACKENDS:
        _enable(name, allow_math=False)
        try:
            times[name] = _measure_ms(device, dtype, b, s, n, d, dropout_p)
        except RuntimeError:  # The kernel does not support this device, dtype or shape.
            torch.cuda.synchronize(device)
        if times and deterministic:
            break
    chosen = fastest(times)
    _enable(chosen)
    if not times:
        return "attention: unfused, since no kernel supports this dtype and shape here"
    if deterministic:
        return f"attention: {chosen}, the first deterministic kernel that supports this dtype and shape"
    measured = ", ".join(f"{name} {time:.2f}" for name, time in times.items())
    return f"attention: {chosen}, the fastest (ms forward and backward: {measured})"


@contextlib.contextmanager
def inference(model: nn.Module) -> Iterator[None]:
    """Context manager: `model` in evaluation mode, without cuDNN's kernel. That kernel makes a plan for each new
    length, which takes 0.05 to 1 s (pytorch#155958), and generation has a new length for each token. The former state
    is restored afterwards."""
    was_training = model.training
    model.eval()
    try:
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            yield
    finally:
        model.train(was_training)


def fastest(times: dict[str, float]) -> str:
    """Return the fastest kernel in `times` (name to ms). A later kernel must be faster by the factor `MIN_SPEEDUP`.
    "unfused" if `times` is empty."""
    chosen = "unfused"
    for name, time in times.items():
        if chosen == "unfused" or time * MIN_SPEEDUP < times[chosen]:
            chosen = name
    return chosen


def _enable(chosen: str, *, allow_math: bool = True) -> None:
    for name, switch in BACKENDS.items():
        switch(name == chosen)
    torch.backends.cuda.enable_math_sdp(allow_math)


def _measure_ms(device: torch.device, dtype: torch.dtype, b: int, s: int, n: int, d: int, dropout_p: float) -> float:
    """Return the median time of forward and backward. The state of the default generator does not change."""
    times = []
    with torch.random.fork_rng(devices=[device]):
        qkv = torch.randn(s, b, n, 3, d, device=device, dtype=dtype, requires_grad=True)
        for _ in range(REPEATS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            y = causal_attention(qkv, dropout_p)
            torch.autograd.grad(y, qkv, torch.ones_like(y), retain_graph=True)
            end.record()
            torch.cuda.synchronize(device)
            times.append(start.elapsed_time(end))
    return sorted(times)[REPEATS // 2]
