"""The sharded optimizer, gradient reduction in bf16 and the offloaded optimizer do not change the losses. With bf16 the
losses are nearly equal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.gpt2.config.arguments import parse
from megatron.gpt2.train.trainer import Trainer
from tests.distributed import run_ranks
from tests.megatron.gpt2.train.training_runs import finish, start, steps, write_text

# A step has 8 samples, accumulated on 2 and on 4 ranks. A bucket is smaller than a layer. Rows have 48 elements and
# shards a multiple of 64, so shards end inside a row.
TINY = "--hidden-size 48 --num-layers 2 --global-batch-size 8 --micro-batch-size 1 --ddp-bucket-size 10000 --lr 1e-3"
SHARDED, OFFLOADED = "--use-distributed-optimizer", "--cpu-offload-optimizer"
STEPS = 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("distributed_optimizer")
    write_text(folder)
    return folder


def begin(rank: int, world_size: int, folder: str, name: str, flags: str = "") -> Trainer:
    trainer = start(rank, world_size, folder, f"{TINY} --save {folder}/{name} {flags}".split())
    assert len(trainer.state.buffer.buckets) >= 4
    assert trainer.state.buffer.is_sharded == (SHARDED in flags and trainer.parallel.data_parallel_size > 1)
    assert trainer.state.buffer.offloaded == (OFFLOADED in flags)
    return trainer


def weights(trainer: Trainer) -> dict[str, Tensor]:
    trainer.state.param_gather.finish_param_sync()
    return {name: parameter.detach().clone() for name, parameter in trainer.state.model.named_parameters()}


VARIANTS = {
    "whole": (STEPS, ""),
    "sharded": (STEPS, SHARDED),
    "clipped": (6, "--clip-grad 1.0"),
    "clipped, sharded": (6, f"--clip-grad 1.0 {SHARDED}"),
    "short": (6, ""),
    "offloaded": (6, OFFLOADED),
    "sharded, offloaded": (6, f"{SHARDED} {OFFLOADED}"),
    "bf16": (6, "--grad-reduce-in-bf16"),
    "bf16, sharded": (6, f"--grad-reduce-in-bf16 {SHARDED}"),
}


def variants(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    results = {}
    for name, (count, flags) in VARIANTS.items():
        trainer = begin(rank, world_size, folder, f"variants{world_size}", f"--clip-grad 0 {flags}")
        results[name] = steps(trainer, count) | {"weights": weights(trainer)}
        finish(trainer)
    return results


@pytest.mark.parametrize("data_parallel", [2, pytest.param(4, marks=pytest.mark.wide)])
def test_losses_equal_those_of_the_unsharded_optimizer(folder: Path, data_parallel: int):
    for result in run_ranks(variants, data_parallel, str(folder)):
        whole, clipped, short, bf16 = (result[name] for name in ("whole", "clipped", "short", "bf16"))
        assert whole["loss"][0] - whole["loss"][-1] > 0.5, "the run must learn something, or equality shows nothing"
        for name, like in (("sharded", whole), ("offloaded", short), ("sharded, offloaded", short)):
            assert result[name]["loss"] == like["loss"], name
            for parameter, weight in like["weights"].items():
                assert torch.equal(result[name]["weights"][parameter], weight), (name, parameter)
        # The norm is summed in a different order. With clipping it affects every weight.
        assert max(clipped["norm"]) > 1.0
        assert clipped["loss"] != short["loss"]
        assert result["clipped, sharded"]["loss"] == pytest.approx(clipped["loss"], rel=1e-5)
        # The rounding error of bf16 is 2^-9, for each gradient and each partial sum. The first updates of AdamW depend
        # on the signs of the gradients, and the errors of many weights average out in a loss.
        assert bf16["loss"][0] == short["loss"][0] and bf16["loss"] != short["loss"], "nothing was rounded"
        assert bf16["loss"] == pytest.approx(short["loss"], rel=2**-9)
        assert bf16["norm"] == pytest.approx(short["norm"], rel=data_parallel * 2**-9)
        assert result["bf16, sharded"]["loss"] == bf16["loss"]


@pytest.mark.parametrize("flag", ["--use-distributed-optimizer", "--grad-reduce-in-bf16"])
def test_torch_ddp_is_refused(flag: str):
    with pytest.raises(ValueError, match=f"^{flag} needs --DDP-impl local: .*") as error:
        _ = parse(["--DDP-impl", "torch", flag]).config
    assert "\n" not in str(error.value)
