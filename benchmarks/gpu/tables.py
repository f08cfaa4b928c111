"""Stage `tables`: the time of each operation of a training step by itself, with all implementations that torch has.

An implementation is an arm: a name and a function. To add one, e.g. a fused kernel, add a line to its table.
Legend: b micro-batch, s sequence, n heads, d head size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import mpu
from benchmarks import harness
from benchmarks.first_minutes import CaseRecorder, free_memory, is_broken
from benchmarks.generation import generate_ours
from benchmarks.harness import milliseconds
from benchmarks.train_worker import build_random_model
from megatron.gpt2.config import OptimizerConfig, ParallelConfig
from megatron.gpt2.model.gpt2 import GPT2Model, layer_config
from megatron.gpt2.optimizer.bucket_reducer import ParamAllGather, choose_bucket_size
from megatron.gpt2.optimizer.optimizer import MixedPrecisionOptimizer, build_loss_scaler
from megatron.gpt2.optimizer.param_and_grad_buffer import ParamAndGradBuffer
from mpu import kernels

if TYPE_CHECKING:
    from benchmarks.gpu.stages import StageConfig

Arms = dict[str, Callable[[], Any]]

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "fused": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "formula": SDPBackend.MATH,
}


def tables(cfg: StageConfig, cases: CaseRecorder) -> None:
    """Run the cases of this stage."""
    mpu.initialize_model_parallel(1)
    for name in cfg.names:
        cases.run(f"attention, {name}", partial(attention, cfg, name))
        cases.run(f"optimizer, {name}", partial(optimizer_step, cfg, name))
    cases.run("decoding, 345M", partial(decoding, cfg, "345M"))


def time_arms(cfg: StageConfig, arms: Arms, flops: float = 0.0) -> dict[str, dict[str, Any]]:
    """Measure each arm: milliseconds, TFLOP/s if `flops` is given, and on a GPU the peak of additional memory. An arm
    that this machine cannot compute has an entry "failed"."""
    found: dict[str, dict[str, Any]] = {}
    on_gpu = cfg.device.type == "cuda"
    for name, work in arms.items():
        try:
            if on_gpu:
                torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated() if on_gpu else 0
            ms = milliseconds(work, cfg.device, cfg.repeats)
        except Exception as error:
            if is_broken(error):
                raise
            found[name] = {"failed": harness.strip_paths(f"{type(error).__name__}: {error}".splitlines()[0])}
            free_memory()
            continue
        found[name] = {"ms": ms, **({"tflops": 1e-9 * flops / ms} if flops else {})}
        if on_gpu:
            found[name]["peak_mb"] = (torch.cuda.max_memory_allocated() - before) / 2**20
    return found


def random_tensor(cfg: StageConfig, *shape: int, grad: bool = False) -> Tensor:
    """Draw bf16 numbers on the device."""
    return torch.randn(*shape, device=cfg.device).bfloat16().requires_grad_(grad)


def attention(cfg: StageConfig, name: str) -> dict[str, Any]:
    """Time causal attention of a micro-batch of 32, forward and with backward, by kernel, with and without dropout.
    FLOPs include the masked half, as in MFU."""
    model, b = cfg.workload(name).model, 2 if cfg.smoke else 32
    s, n = model.max_position_embeddings, model.num_attention_heads
    d = model.hidden_size // n
    qkv = random_tensor(cfg, s, b, n, 3, d, grad=True)
    q, k, v = qkv.permute(3, 1, 2, 0, 4).unbind(0)  # [s, b, n, 3, d] -> three of [b, n, s, d]

    def forward(backend: SDPBackend, p: float) -> Tensor:
        with sdpa_kernel([backend]):
            return F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)

    def both(backend: SDPBackend, p: float) -> object:
        y = forward(backend, p)
        return torch.autograd.grad(y, qkv, torch.ones_like(y))

    found, flops = {}, 4.0 * b * n * s * s * d
    for p in (0.0, 0.1):
        for which, call, times in (("forward", forward, 1), ("forward and backward", both, 3)):
            arms: Arms = {backend: partial(call, kind, p) for backend, kind in BACKENDS.items()}
            found[f"{which}, dropout {p}"] = time_arms(cfg, arms, flops=times * flops)
    ends = torch.arange(0, b * s + 1, s // 4, dtype=torch.int32, device=cfg.device)
    packed = random_tensor(cfg, b * s, 1, n, 3, d)
    documents: Arms = {"ours": lambda: kernels.varlen_causal_attention(packed, 0.0, [s // 4] * (4 * b), ends)}
    return {**found, "forward, documents of a quarter of the sequence": time_arms(cfg, documents)}


def build_model(cfg: StageConfig, name: str) -> GPT2Model:
    """Build the model `name` on the device, in float32."""
    config = cfg.workload(name).model
    return build_random_model(config, layer_config(config, device=cfg.device))


def optimizer_step(cfg: StageConfig, name: str) -> dict[str, Any]:
    """Time the optimizer's step in bf16, and separately its norm and its rounding; the rest is AdamW."""
    device, config = cfg.device, OptimizerConfig()
    model = build_model(cfg, name)
    buffer = ParamAndGradBuffer(
        model, torch.bfloat16, bucket_size=choose_bucket_size(ParallelConfig().ddp_bucket_size, 1)
    )
    scaler = build_loss_scaler(config, torch.bfloat16, device)
    rates = torch.tensor([1e-4, 1e-4])
    optimizer = MixedPrecisionOptimizer(buffer, ParamAllGather(buffer, model, None), config, scaler, rates)
    for index in range(len(buffer.buckets)):
        buffer.bucket_grads(index).fill_(1e-3)
    grads = buffer.shard_grads()
    split, whole = (
        [g for g, o in zip(grads, buffer.local_shards, strict=True) if o.group_key.is_tensor_parallel is kind]
        for kind in (True, False)
    )
    count = buffer.params.numel()
    with mock.patch.object(buffer, "free_grads"):  # The gradients are kept for every step.
        step_ms = milliseconds(optimizer.step, device, cfg.repeats)
    works: Arms = {
        "norm_ms": lambda: mpu.all_reduced_squared_norm(split, whole, device),
        "norm_by_foreach_ms": lambda: torch.stack(torch._foreach_norm(grads)).norm(),
        "write_back_ms": optimizer.copy_masters_and_gather,
    }
    found = {name: milliseconds(work, device, cfg.repeats) for name, work in works.items()}
    # These are the bytes read and written: 28 by AdamW, 4 for gradients that it writes back, 4 by the norm, 6 by the
    # rounding.
    moved = {"bytes_per_parameter": 42, "gb_per_s": 42e-6 * count / step_ms}
    return {"parameters": count, "ranges": len(buffer.local_shards), "step_ms": step_ms, **found, **moved}


def decoding(cfg: StageConfig, name: str) -> dict[str, Any]:
    """Time a token of 1 and of 8 texts in bf16. Few tokens show whether a kernel is slow for each new length."""
    model = build_model(cfg, name).bfloat16().eval()
    prompt, new = (8, 4) if cfg.smoke else (512, 16)
    found: dict[str, Any] = {}
    for b in (1, 8):
        # The first time is that of the prompt, and is left out.
        ends = generate_ours(model, torch.randint(model.vocab_size, (b, prompt)), new)[1][1:]
        ms = [1000 * (end - start) for start, end in zip(ends, ends[1:], strict=False)]
        found[f"{b} texts"] = {"ms": sorted(ms)[len(ms) // 2], "first_ms": ms[0], "most_ms": max(ms)}
    return found
