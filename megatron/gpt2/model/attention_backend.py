"""Choose which of torch's kernels computes attention on a GPU: in training by timing them on the run's own shape, in
inference one that takes every length alike.

On Hopper torch's default is the kernel of cuDNN, which is the fastest one without dropout. With dropout it can be
several times slower than FlashAttention, so no fixed choice is right.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from mpu.kernels import causal_attention

# In the order of preference: a later one must be faster by a margin, so that two runs on one machine agree.
SWITCHES: dict[str, Callable[[bool], Any]] = {
    "flash": torch.backends.cuda.enable_flash_sdp,
    "fused": torch.backends.cuda.enable_cudnn_sdp,
    "efficient": torch.backends.cuda.enable_mem_efficient_sdp,
}
MARGIN = 1.05
REPEATS = 10


def choose_attention(
    requested: str, device: torch.device, dtype: torch.dtype, *, b: int, s: int, n: int, d: int, dropout_p: float
) -> str:
    """Switch torch to one kernel for attention over [s, b, n, d] on this device, and return a line that says which and
    why.

    requested: a value of --attention-backend. torch's plain formula stays allowed, for shapes that the kernel refuses.
    With torch's deterministic algorithms on, which exclude the kernel of cuDNN, the first one that takes the shape
    counts: measured times differ from run to run, and so would the bits.
    On a CPU there is nothing to choose, and the line is empty.
    """
    if device.type != "cuda":
        return ""
    if requested != "auto":
        _switch(requested)
        return f"attention: {requested}, by --attention-backend"
    times: dict[str, float] = {}
    takes_first = torch.are_deterministic_algorithms_enabled()
    for name in SWITCHES:
        _switch(name, formulas=False)
        try:
            times[name] = _milliseconds(device, dtype, b, s, n, d, dropout_p)
        except RuntimeError:  # the kernel does not know this device, dtype or shape
            torch.cuda.synchronize(device)
        if times and takes_first:
            break
    chosen = fastest(times)
    _switch(chosen)
    if not times:
        return "attention: unfused, since no kernel takes this dtype and shape here"
    if takes_first:
        return f"attention: {chosen}, the first with a fixed order of sums that takes this dtype and shape"
    measured = ", ".join(f"{name} {time:.2f}" for name, time in times.items())
    return f"attention: {chosen}, the fastest (ms forward and backward: {measured})"


@contextlib.contextmanager
def inference(model: nn.Module) -> Iterator[None]:
    """`model` in evaluation mode, without the kernel of cuDNN: that one makes a plan for each new length, for 0.05 to
    1 s (pytorch#155958), and in generation every token is one. Afterwards all is as before."""
    was_training = model.training
    model.eval()
    try:
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            yield
    finally:
        model.train(was_training)


def fastest(times: dict[str, float]) -> str:
    """The name in `times` (ms by name) that no later one beats by the factor `MARGIN`. "unfused" where it is empty."""
    chosen = "unfused"
    for name, time in times.items():
        if chosen == "unfused" or time * MARGIN < times[chosen]:
            chosen = name
    return chosen


def _switch(chosen: str, *, formulas: bool = True) -> None:
    for name, switch in SWITCHES.items():
        switch(name == chosen)
    torch.backends.cuda.enable_math_sdp(formulas)


def _milliseconds(device: torch.device, dtype: torch.dtype, b: int, s: int, n: int, d: int, dropout_p: float) -> float:
    """The median time of a forward and a backward. The default generator is left as it was."""
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
