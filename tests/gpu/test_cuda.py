"""Tests that need a GPU: models, kernels and NCCL compute the results of a CPU, within rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import mpu
from megatron.gpt2.device import ATTENTION_BACKENDS, choose_attention
from megatron.gpt2.model.gpt2 import GPT2Model, build_block_config
from megatron.gpt2.train.trainer import Trainer
from mpu.attention import core_attention
from mpu.kernels.triton_kernel import TritonKernel
from tests.megatron.gpt2.train.test_single_rank_group import RUNS, check_single_rank_group, single_rank_group
from tests.megatron.gpt2.train.training_runs import SHAPE, finish, loss_and_gradients, start, steps, write_text
from tests.mpu.kernels.test_triton_kernel import KERNELS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_text(tmp_path, 60_000)
    return tmp_path


def on_gpu(folder: Path, flags: str) -> Trainer:
    return start(0, 1, folder, f"--device cuda {flags}")


def model_on(device: str) -> GPT2Model:
    mpu.initialize_model_parallel(1)
    return GPT2Model(SHAPE, build_block_config(SHAPE, device=device)).train()


def test_fp32_equals_the_cpu_and_compiled_equals_eager():
    compiled = model_on("cuda")
    compiled.compile_layers()
    (of_cpu, grads), (loss, on_gpu) = (loss_and_gradients(model_on(device), device) for device in ("cpu", "cuda"))
    loss_compiled, grads_compiled = loss_and_gradients(compiled, "cuda")
    assert loss.item() == pytest.approx(of_cpu.item(), rel=1e-6)
    assert loss_compiled.item() == pytest.approx(loss.item(), rel=1e-5)
    for name, grad in on_gpu.items():
        assert (grad.cpu() - grads[name]).norm() <= 1e-5 * grads[name].norm(), name
        assert (grads_compiled[name] - grad).norm() <= 1e-4 * grad.norm(), name


@pytest.mark.parametrize(
    "flags",
    [
        "--precision bf16",
        "--precision fp16 --initial-loss-scale 1024",
        "--precision bf16 --recompute-granularity full",
        "--precision bf16 --cpu-offload-optimizer",
        "--precision bf16 --compile",
    ],
)
def test_losses_stay_near_fp32_on_the_cpu(folder: Path, flags: str):
    seen: list[dict[str, Any]] = []
    for name, where in (("cpu", ""), ("gpu", f"--device cuda {flags}")):
        trainer = start(0, 1, folder, f"--save {folder}/{name} {where}")
        seen.append(steps(trainer, 20))
        finish(trainer)
    assert seen[0]["loss"][0] - seen[0]["loss"][-1] > 0.3, "the run must learn something"
    assert not any(seen[1]["skipped"])
    assert seen[1]["loss"] == pytest.approx(seen[0]["loss"], rel=2**-8)


@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
def test_the_attention_kernel_is_measured(dropout_p: float):
    reason = choose_attention(
        "auto", torch.device("cuda", 0), torch.bfloat16, b=2, s=256, n=4, d=64, dropout_p=dropout_p
    )
    assert "the fastest" in reason and sum(name in reason for name in ATTENTION_BACKENDS) >= 2, reason


@pytest.mark.parametrize("flags, tolerance", [("--attention-dropout 0.1", 1e-3), ("--deterministic", 0.0)])
def test_a_resume_goes_on_as_before(folder: Path, flags: str, tolerance: float):
    """Without --deterministic the losses are only close, because some backward kernels add in no fixed order."""
    flags = f"--precision bf16 --hidden-dropout 0.1 {flags}"
    whole = on_gpu(folder, flags)
    steps(whole, 5)
    whole.checkpoints.save()
    expected = steps(whole, 5)["loss"]
    finish(whole)
    resumed = on_gpu(folder, f"{flags} --load {folder}/save")
    assert resumed.progress.iteration == 5
    assert steps(resumed, 5)["loss"] == pytest.approx(expected, rel=tolerance, abs=0.0)
    finish(resumed)


@pytest.mark.parametrize("dtype, dropout_p", [(torch.bfloat16, 0.0), (torch.float32, 0.0), (torch.bfloat16, 1e-9)])
def test_attention_by_document_equals_the_cpu(dtype: torch.dtype, dropout_p: float):
    """Test the kernel for cumulative lengths and, with dropout, attention of each document by itself."""
    tokens = torch.ones(4, 512, dtype=torch.int64)
    tokens[1, 100], tokens[2, [0, 5, 6, 511]] = 0, 0
    reference = torch.randn(512, 4, 2, 3, 64, requires_grad=True)
    qkv = reference.detach().to("cuda", dtype).requires_grad_()
    expected = core_attention(reference, 0.0, mpu.PackedSeqParams.from_tokens(tokens, 0, "cpu"))
    with mock.patch("mpu.attention.current_rng_tracker"):
        got = core_attention(qkv, dropout_p, mpu.PackedSeqParams.from_tokens(tokens, 0, "cuda"))
    for y in (expected, got):
        y.float().square().sum().backward()
    assert (got.detach().float().cpu() - expected).norm() <= 1e-2 * expected.norm()
    assert (qkv.grad.float().cpu() - reference.grad).norm() <= 2e-2 * reference.grad.norm()


@pytest.mark.parametrize("name", RUNS)
def test_a_run_in_a_group_of_one(folder: Path, name: str):
    """The run calls every NCCL collective with CUDA tensors."""
    check_single_rank_group(name, "nccl", torch.device("cuda", 0), folder)


def test_nccl_sends_to_itself():
    device = torch.device("cuda", 0)
    x, y = torch.arange(5.0, device=device), torch.zeros(5, device=device)
    with single_rank_group("nccl", device):
        dist.all_reduce(x)
        _, (received,) = mpu.batched_p2p_ops([(x, 0)], [(y, 0)], dist.distributed_c10d._get_default_group())
        assert torch.equal(received.wait(), x)


LARGE = (
    "--num-layers 4 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024 "
    "--micro-batch-size 2 --precision bf16"
)
INPUT = 2 * 1024 * 1024 * 2  # a layer's input in bytes


@pytest.mark.parametrize(
    "flags, on_host", [("--recompute-granularity full", "--checkpoint-in-cpu"), ("", "--cpu-offloading-num-layers 3")]
)
def test_losses_are_the_same_with_activations_in_the_hosts_memory(folder: Path, flags: str, on_host: str):
    seen, kept = [], []
    for more in ("", on_host):
        trainer = on_gpu(folder, f"{LARGE} {flags} {more} --save {folder}/{len(more)}")
        seen.append(steps(trainer, 5))
        transformer = trainer.state.model.transformer
        transformer.register_forward_hook(lambda *_: kept.append(torch.cuda.memory_allocated()))
        seen.append(steps(trainer, 1))
        finish(trainer)
        del trainer, transformer
    whole, parked = seen[:2], seen[2:]
    assert [s["loss"] for s in whole] == [pytest.approx(s["loss"], rel=1e-6) for s in parked]
    assert kept[1] <= kept[0] - 3 * INPUT  # The input of the first layer stays on the GPU.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_a_triton_kernel_computes_what_its_reference_computes(kernel: TritonKernel[Any, Any], dtype: torch.dtype):
    assert kernel.compare(torch.device("cuda"), dtype) == ""
