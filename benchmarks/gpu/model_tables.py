"""Tables of what works on a whole model: a step of the optimizer, and tokens that are generated one by one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import mpu
from benchmarks.arms import model_drawn_in_place
from benchmarks.generation import our_tokens
from benchmarks.gpu.setting import Setting
from benchmarks.timing import milliseconds
from megatron.gpt2.config import OptimizerConfig, ParallelConfig
from megatron.gpt2.model.gpt2 import GPT2Model, layer_config
from megatron.gpt2.optimizer.flat_parameters import FlatParameters
from megatron.gpt2.optimizer.gradient_reducer import bucket_size
from megatron.gpt2.optimizer.optimizer import AdamWOptimizer, build_loss_scaler
from megatron.gpt2.optimizer.parameter_gatherer import ParameterGatherer


def model_of(setting: Setting, name: str) -> GPT2Model:
    """The model `name` on the device, in float32."""
    config = setting.model(name)
    return model_drawn_in_place(config, layer_config(config, device=setting.device))


def step(setting: Setting, name: str) -> dict[str, Any]:
    """Milliseconds of the optimizer's step in bf16, and of its norm and its rounding alone; the rest is AdamW."""
    device = setting.device
    model = model_of(setting, name)
    flat = FlatParameters(model, torch.bfloat16, bucket_size=bucket_size(ParallelConfig().ddp_bucket_size, 1))
    optimizer = AdamWOptimizer(
        flat,
        ParameterGatherer(flat, model, None),
        OptimizerConfig(),
        build_loss_scaler(OptimizerConfig(), torch.bfloat16, device),
        torch.tensor([1e-4, 1e-4]),
    )
    for index in range(len(flat.buckets)):
        flat.bucket_grads(index).fill_(1e-3)
    grads = flat.owned_grads()

    def norm() -> torch.Tensor:
        return mpu.squared_norm(
            [g for g, owned in zip(grads, flat.owned, strict=True) if owned.is_split],
            [g for g, owned in zip(grads, flat.owned, strict=True) if not owned.is_split],
            device,
        )

    with mock.patch.object(flat, "free_grads"):  # the same ones for every step
        whole = milliseconds(optimizer.step, device, setting.repeats)
    count = flat.params.numel()
    found = {
        "parameters": count,
        "ranges": len(flat.owned),
        "step_ms": whole,
        "norm_ms": milliseconds(norm, device, setting.repeats),
        "norm_by_foreach_ms": milliseconds(
            lambda: torch.stack(torch._foreach_norm(grads)).norm(), device, setting.repeats
        ),
        "write_back_ms": milliseconds(optimizer.write_back, device, setting.repeats),
    }
    # Read and written: 28 bytes by AdamW and 4 by gradients that it writes back, 4 by the norm, 6 by the rounding.
    return {**found, "bytes_per_parameter": 42, "gb_per_s": 42e-6 * count / whole}


def decoding(setting: Setting, name: str, backends: Mapping[str, SDPBackend]) -> dict[str, Any]:
    """Milliseconds of a further token of 1 and of 8 texts in bf16, by the kernel of attention; "ours" lets torch choose
    as generation does. A kernel that plans each new length alike costs most with its first tokens, so there are few."""
    model = model_of(setting, name).bfloat16().eval()
    prompt, new = (8, 4) if setting.smoke else (512, 16)
    found: dict[str, Any] = {}
    for arm, backend in {"ours": None, **backends}.items():
        for b in (1, 8):
            texts = torch.randint(model.vocab_size, (b, prompt))
            try:
                with only(backend):
                    ends = our_tokens(model, texts, new)[1][1:]  # without the reading of the prompt
            except RuntimeError as error:
                found[f"{arm}, {b} texts"] = {"failed": str(error).splitlines()[0]}
                continue
            ms = [1000 * (end - start) for start, end in zip(ends, ends[1:], strict=False)]
            found[f"{arm}, {b} texts"] = {"ms": sorted(ms)[len(ms) // 2], "first_ms": ms[0], "most_ms": max(ms)}
    return found


@contextlib.contextmanager
def only(backend: SDPBackend | None) -> Iterator[None]:
    """Inside, generation's attention is by this kernel; by torch's choice where it is None."""

    @contextlib.contextmanager
    def inference(model: nn.Module) -> Iterator[None]:
        assert backend is not None
        with sdpa_kernel([backend]):
            yield

    with (
        contextlib.nullcontext()
        if backend is None
        else mock.patch("megatron.gpt2.generate.generation.inference", inference)
    ):
        yield
