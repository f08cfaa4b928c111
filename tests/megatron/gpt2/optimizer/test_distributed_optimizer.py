"""The sharded optimizer, reduction in bf16 and the optimizer on the host: what they save, and that they change nothing
(bf16: nearly nothing) else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mpu
from megatron.gpt2.checkpoint.reader import Checkpoint
from megatron.gpt2.config.arguments import parse
from megatron.gpt2.train.run import Run
from tests.distributed import run_ranks
from tests.megatron.gpt2.train.training_runs import finish, start, state, steps, write_text

# 8 samples a step, accumulated on 2 and on 4 ranks; buckets that hold a part of a layer; rows of 48, which no rank's
# part of a bucket, a multiple of 64, ends with.
TINY = (
    "--hidden-size 48 --num-layers 2 --global-batch-size 8 --micro-batch-size 1 --ddp-bucket-size 10000 --lr 1e-3"
).split()
SHARDED, OFFLOADED = "--use-distributed-optimizer", "--cpu-offload-optimizer"
STEPS = 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("distributed_optimizer")
    write_text(folder)
    return folder


def begin(rank: int, world_size: int, folder: str, name: str, *flags: str) -> Run:
    run = start(rank, world_size, folder, [*TINY, "--save", f"{folder}/{name}", *flags])
    assert len(run.engine.flat.buckets) >= 4
    assert run.engine.flat.is_sharded == (SHARDED in flags and run.parallel.data_parallel_size > 1)
    assert run.engine.flat.offloaded == (OFFLOADED in flags)
    return run


def weights(run: Run) -> dict[str, Tensor]:
    run.engine.gatherer.wait()
    return {name: parameter.detach().clone() for name, parameter in run.engine.model.named_parameters()}


# ------------------------------------------------------------------------------------------------- the same training

VARIANTS = {
    "whole": (STEPS, []),
    "sharded": (STEPS, [SHARDED]),
    "clipped": (STEPS, ["--clip-grad", "1.0"]),
    "clipped, sharded": (STEPS, ["--clip-grad", "1.0", SHARDED]),
    "short": (6, []),
    "offloaded": (6, [OFFLOADED]),
    "sharded, offloaded": (6, [SHARDED, OFFLOADED]),
    "bf16": (6, ["--grad-reduce-in-bf16"]),
    "bf16, sharded": (6, ["--grad-reduce-in-bf16", SHARDED]),
}


def variants(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    results = {}
    for name, (count, flags) in VARIANTS.items():
        run = begin(rank, world_size, folder, f"variants{world_size}", "--clip-grad", "0", *flags)
        results[name] = steps(run, count) | {"weights": weights(run)}
        finish(run)
    return results | {"held": held(rank, world_size, folder)}


@pytest.mark.parametrize("data_parallel", [2, pytest.param(4, marks=pytest.mark.wide)])
def test_losses_are_those_of_the_whole_optimizer(folder: Path, data_parallel: int):
    for result in run_ranks(variants, data_parallel, str(folder)):
        whole, clipped, short, bf16 = (result[name] for name in ("whole", "clipped", "short", "bf16"))
        assert whole["loss"][0] - whole["loss"][-1] > 0.5, "the run must learn something, or equality shows nothing"
        for name, like in (("sharded", whole), ("offloaded", short), ("sharded, offloaded", short)):
            assert result[name]["loss"] == like["loss"], name
            for parameter, weight in like["weights"].items():
                assert torch.equal(result[name]["weights"][parameter], weight), (name, parameter)
        # The norm is summed in another order, and enters every weight once it clips.
        assert max(clipped["norm"]) > 1.0
        assert clipped["loss"] != whole["loss"]
        assert result["clipped, sharded"]["loss"] == pytest.approx(clipped["loss"], rel=1e-5)
        # Half a unit of bf16, 2^-9, on the gradients of a step and on each partial sum of the ranks. AdamW's update
        # follows the gradients' signs, and errors of many weights average out in a loss.
        assert bf16["loss"][0] == short["loss"][0] and bf16["loss"] != short["loss"], "nothing was rounded"
        assert bf16["loss"] == pytest.approx(short["loss"], rel=2**-9)
        assert bf16["norm"] == pytest.approx(short["norm"], rel=data_parallel * 2**-9)
        assert result["bf16, sharded"]["loss"] == bf16["loss"]
        assert_share_of_memory(result["held"], data_parallel)


def held(rank: int, world_size: int, folder: str) -> dict[str, int]:
    """Bytes of the memory behind masters and moments, and what the padding of the buffer is."""
    run = begin(rank, world_size, folder, f"memory{world_size}", "--precision", "bf16", SHARDED)
    steps(run, 1)
    moments = run.engine.optimizer.moments.values()
    tensors = [*run.engine.flat.masters, *(tensor for rooms in moments for tensor in rooms)]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    true = sum(parameter.numel() for parameter in run.engine.model.parameters())
    finish(run)
    return {
        "bytes": sum(storages.values()),
        "true": true,
        "buffer": run.engine.flat.params.numel(),
        "tensors": len(run.engine.flat.ranges),
        "buckets": len(run.engine.flat.buckets),
    }


def assert_share_of_memory(seen: dict[str, int], data_parallel: int) -> None:
    assert seen["bytes"] * data_parallel == 12 * seen["buffer"], "fp32 masters and two moments, of 1/dp of the buffer"
    padding = 64 * (seen["tensors"] + data_parallel * seen["buckets"])
    assert 0 <= seen["buffer"] - seen["true"] <= padding < 0.1 * seen["true"]


def test_one_rank_holds_all(folder: Path):
    """That data-parallel ranks hold their share is seen above, beside their losses."""
    assert_share_of_memory(held(0, 1, str(folder)), 1)


# -------------------------------------------------------------------------------------------------------- checkpoints


def resumed(rank: int, world_size: int, folder: str) -> list[Any]:
    """For each kind of run: 6 steps in one go, and 3 with 3 more after a load."""
    results: list[Any] = []
    for flags in ([SHARDED], [SHARDED, "--precision", "bf16"], [SHARDED, OFFLOADED, "--precision", "bf16"]):
        dropout = "--attention-dropout 0.1 --hidden-dropout 0.1".split()
        name = f"resume{len(results)}"
        run = begin(rank, world_size, folder, f"{name}_straight", *dropout, *flags)
        straight = steps(run, 6)["loss"], state(run)
        finish(run)
        run = begin(rank, world_size, folder, name, *dropout, *flags)
        first = steps(run, 3)["loss"]
        assert run.save() is not None
        finish(run)
        torch.manual_seed(99)
        run = begin(rank, world_size, folder, name, *dropout, *flags)
        assert run.progress.iteration == 3
        results.append((straight, (first + steps(run, 3)["loss"], state(run))))
        finish(run)
    return results


def test_resume_is_bit_identical(folder: Path):
    for results in run_ranks(resumed, 2, str(folder)):
        assert len(results) == 3
        for (losses, tensors), (other_losses, other_tensors) in results:
            assert losses == other_losses and losses[-1] < losses[0]
            assert tensors.keys() == other_tensors.keys()
            for name, tensor in tensors.items():
                assert torch.equal(other_tensors[name], tensor), name


def true_state(runs: list[dict[str, Any]], kind: str) -> dict[str, Tensor]:
    """The whole true tensors of a kind, put together from what every rank holds."""
    whole = {}
    for name, spec in runs[0]["specs"].items():
        size = runs[0]["model_parallel_size"]
        shards = [torch.full(spec.local_shape(size), torch.nan) for _ in range(size)]
        for run in runs:
            for other_kind, other_name, values, begin in run["state"]:
                if (other_kind, other_name) == (kind, name):
                    shards[run["model_parallel_rank"]].view(-1)[begin : begin + values.numel()] = values
        whole[name] = spec.merge(shards)
        assert not whole[name].isnan().any(), f"nobody holds all of {kind} {name}"
    return whole


def everything(run: Run) -> dict[str, Any]:
    run.engine.gatherer.wait()
    return {
        "specs": mpu.partition_specs(run.engine.model),
        "model_parallel_size": run.parallel.model_parallel_size,
        "model_parallel_rank": run.parallel.model_parallel_rank,
        "state": [(s.kind, s.name, s.values.clone(), s.start) for s in run.engine.optimizer.tensors()],
        "steps": run.engine.optimizer.state_dict(),
        "weights": weights(run),
    }


def moved(rank: int, world_size: int, folder: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Sharded over 4 data-parallel ranks: 3 steps, saved. The same loaded, and saved, over 2 × 2."""
    run = begin(rank, world_size, folder, "dp4", "--precision", "bf16", SHARDED)
    steps(run, 3)
    assert run.save() is not None
    before = everything(run)
    finish(run)
    run = begin(
        rank,
        world_size,
        folder,
        "mp2_dp2",
        "--precision",
        "bf16",
        SHARDED,
        "--model-parallel-size",
        "2",
        "--load",
        f"{folder}/dp4",
        "--ddp-bucket-size",
        "7000",
    )
    after = everything(run)
    run.save()
    finish(run)
    return before, after


def test_a_checkpoint_opens_under_any_layout(folder: Path):
    runs = run_ranks(moved, 4, str(folder))
    before, after = [list(side) for side in zip(*runs, strict=True)]
    checkpoint = Checkpoint(folder / "dp4" / "iter_0000003")
    files = {name for name in checkpoint.files if "_dp_" in name and "rng" not in name}
    assert files == {
        f"mp_rank_00/{kind}_dp_0{i}.safetensors" for kind in ("master", "exp_avg", "exp_avg_sq") for i in range(4)
    }
    assert (
        max(
            len([key for key in info.boxes if key.partition("#")[0] == "master.word_embeddings.weight"])
            for info in checkpoint.files.values()
        )
        == 3
    ), "part of a row, rows, part of a row"
    assert checkpoint.facts["layout"]["optimizer_is_sharded"] is True
    loads = [after]
    for name in ("dp4", "mp2_dp2"):
        run = begin(0, 1, str(folder), f"from_{name}", "--precision", "bf16", "--load", f"{folder}/{name}")
        loads.append([everything(run)])
        finish(run)
    for kind in ("master", "exp_avg", "exp_avg_sq"):
        saved = true_state(before, kind)
        assert all(values.any() for values in saved.values())
        for loaded in loads:
            for name, values in true_state(loaded, kind).items():
                assert torch.equal(values, saved[name]), (kind, name)
    for loaded in loads:
        assert loaded[0]["steps"] == before[0]["steps"]
    for name, weight in loads[1][0]["weights"].items():
        assert torch.equal(weight, before[0]["weights"][name]), "gathered weights are the rounded masters of all"


# --------------------------------------------------------------------------------------------------- ranks that agree


def poisoned(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """One gradient on one rank is infinite in the third step."""
    run = begin(
        rank,
        world_size,
        folder,
        "overflow",
        "--precision",
        "fp16",
        "--initial-loss-scale",
        "1024",
        "--hysteresis",
        "1",
        SHARDED,
    )
    count, masters = 0, []
    if rank == 1:
        dict(run.engine.model.named_parameters())["transformer.layers.0.mlp.dense_h_to_4h.bias"].register_hook(
            lambda grad: grad + (torch.inf if count == 2 else 0.0)
        )
    seen: dict[str, list[Any]] = {}
    for count in range(5):  # noqa: B007 - the hook reads it
        masters.append(torch.cat(run.engine.flat.masters))
        for key, values in steps(run, 1).items():
            seen.setdefault(key, []).extend(values)
    seen["moved"] = [not torch.equal(a, b) for a, b in zip(masters, masters[1:], strict=False)]
    seen["finite"] = [bool(torch.isfinite(t).all()) for t in state(run).values()]
    finish(run)
    return seen


def test_an_overflow_on_one_rank_is_skipped_by_all(folder: Path):
    for seen in run_ranks(poisoned, 2, str(folder)):
        assert seen["skipped"] == [False, False, True, False, False]
        assert seen["scale"] == [1024, 1024, 1024, 512, 512]
        assert seen["moved"] == [True, True, False, True] and all(seen["finite"])


@pytest.mark.parametrize("flag", ["--use-distributed-optimizer", "--grad-reduce-in-bf16"])
def test_torch_ddp_is_refused(flag: str):
    with pytest.raises(ValueError, match=f"^{flag} needs --DDP-impl local: .*") as error:
        _ = parse(["--DDP-impl", "torch", flag]).config
    assert "\n" not in str(error.value)


def test_names_of_other_megatrons_mean_the_same():
    for name in ("--optimizer-cpu-offload", "--cpu-optimizer", "--cpu_offload_optimizer"):
        assert parse([name]).config.parallel.cpu_offload_optimizer
