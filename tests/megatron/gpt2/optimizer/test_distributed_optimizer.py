"""The sharded optimizer, ZeRO stage 2, gradient reduction in bf16 and the offloaded optimizer do not change the losses.
Also test the order of reductions and all-gathers."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megatron.gpt2.optimizer.bucket_reducer import BucketReducer, ParamAllGather
from megatron.gpt2.train.train_step import train_step
from megatron.gpt2.train.trainer import Trainer
from tests.distributed import run_ranks
from tests.megatron.gpt2.train.training_runs import finish, snapshot, start, steps, whole_weights, write_text

# A step has 8 samples, so 2 or 4 ranks accumulate gradients. A bucket is smaller than a layer. Rows have 48 elements
# and shards a multiple of 64, so shards end inside a row.
TINY = "--hidden-size 48 --num-layers 2 --global-batch-size 8 --micro-batch-size 1 --ddp-bucket-size 10000 --lr 1e-3"
SHARDED, OFFLOADED = "--use-distributed-optimizer", "--cpu-offload-optimizer"
STEPS = 30


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_text(tmp_path)
    return tmp_path


def begin(rank: int, world_size: int, folder: Path, name: str, flags: str = "") -> Trainer:
    trainer = start(rank, world_size, folder, f"{TINY} --save {folder}/{name} {flags}")
    assert len(trainer.state.buffer.buckets) >= 4
    assert trainer.state.buffer.is_sharded == (SHARDED in flags and trainer.parallel.data_parallel_size > 1)
    assert trainer.state.buffer.is_offloaded == (OFFLOADED in flags)
    return trainer


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


def variants(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    results = {}
    for name, (count, flags) in VARIANTS.items():
        trainer = begin(rank, world_size, folder, f"variants{world_size}", f"--clip-grad 0 {flags}")
        results[name] = steps(trainer, count) | {"weights": whole_weights(trainer)}
        finish(trainer)
    return results


@pytest.mark.parametrize("data_parallel", [2, pytest.param(4, marks=pytest.mark.wide)])
def test_losses_equal_those_of_the_unsharded_optimizer(folder: Path, data_parallel: int):
    for result in run_ranks(variants, data_parallel, folder):
        whole, clipped, short, bf16 = (result[name] for name in ("whole", "clipped", "short", "bf16"))
        assert whole["loss"][0] - whole["loss"][-1] > 0.5, "the run must learn something, or equality shows nothing"
        for name, like in (("sharded", whole), ("offloaded", short), ("sharded, offloaded", short)):
            assert result[name]["loss"] == like["loss"], name
            for parameter, weight in like["weights"].items():
                assert torch.equal(result[name]["weights"][parameter], weight), (name, parameter)
        # A sharded optimizer sums the norm in a different order. With clipping, the norm affects every weight.
        assert max(clipped["norm"]) > 1.0
        assert clipped["loss"] != short["loss"]
        assert result["clipped, sharded"]["loss"] == pytest.approx(clipped["loss"], rel=1e-5)
        # bf16 rounds each gradient and each partial sum, with an error of 2^-9. The first updates of AdamW depend only
        # on the signs of gradients, and a loss averages the errors of many weights.
        assert bf16["loss"][0] == short["loss"][0] and bf16["loss"] != short["loss"], "nothing was rounded"
        assert bf16["loss"] == pytest.approx(short["loss"], rel=2**-9)
        assert bf16["norm"] == pytest.approx(short["norm"], rel=data_parallel * 2**-9)
        assert result["bf16, sharded"]["loss"] == bf16["loss"]


BUCKETS = f"{SHARDED} --ddp-bucket-size 40000 --hidden-dropout 0.1"


def gradient_bytes(trainer: Trainer) -> int:
    """Return the bytes of all allocated gradients."""
    buffer = trainer.state.buffer
    return sum(grads.nbytes for grads in (*buffer._grads, *buffer._accumulated_shards) if grads is not None)


def zero_1_and_zero_2(rank: int, world_size: int, folder: Path, flags: str) -> list[dict[str, Any]]:
    """Train 4 steps with each ZeRO stage. Return losses, norms and weights. For step 4 also return which fraction of
    all gradients is allocated at the start of each forward pass, and when each gradient has been computed."""
    results: list[dict[str, Any]] = []
    for stage in ("", "--shard-gradients"):
        trainer = start(rank, world_size, folder, f"{BUCKETS} {flags} {stage} --save {folder}/{len(flags)}{stage}")
        seen = steps(trainer, 3) | {"weights": snapshot(trainer), "forward": [], "backward": []}

        def record(kind: str, trainer: Trainer = trainer, seen: dict[str, Any] = seen) -> None:
            seen[kind].append(gradient_bytes(trainer) / (4 * trainer.state.buffer.params.numel()))

        trainer.state.model.register_forward_pre_hook(lambda *_, record=record: record("forward"))
        for parameter in trainer.state.model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, record=record: record("backward"))
        train_step(trainer)
        finish(trainer)
        results.append(seen)
    return results


@pytest.mark.parametrize("flags", ["--micro-batch-size 4", "--micro-batch-size 4 --grad-reduce-in-bf16"])
def test_with_one_micro_batch_it_is_bit_identical_to_stage_1(folder: Path, flags: str):
    for zero_1, zero_2 in run_ranks(zero_1_and_zero_2, 2, folder, flags):
        assert zero_1["loss"] == zero_2["loss"] and zero_1["norm"] == zero_2["norm"]
        assert all(torch.equal(zero_1["weights"][name], weight) for name, weight in zero_2["weights"].items())
        assert max(zero_2["backward"]) < 0.8, "whole buckets are freed as backward goes on"


@pytest.mark.parametrize(
    "ranks, flags",
    [
        (2, ""),
        pytest.param(4, "--model-parallel-size 2 --sequence-parallel", marks=pytest.mark.wide),
        pytest.param(2, "--cpu-offload-optimizer --recompute-granularity full", marks=pytest.mark.wide),
    ],
)
def test_between_micro_batches_a_rank_keeps_only_its_shard(folder: Path, ranks: int, flags: str):
    flags += " --micro-batch-size 2 --global-batch-size 12"
    for zero_1, zero_2 in run_ranks(zero_1_and_zero_2, ranks, folder, flags):
        assert zero_2["loss"] == pytest.approx(zero_1["loss"], rel=1e-5)
        assert zero_2["norm"] == pytest.approx(zero_1["norm"], rel=1e-4)
        assert zero_1["forward"] == [0, 1, 1] and zero_2["forward"] == [0, 0.5, 0.5]


Event = tuple[str, int]


def record_two_steps(trainer: Trainer) -> list[Event]:
    """Return the events of two steps, (kind, number), in order."""
    events: list[Event] = []
    send, finish_sync = BucketReducer._send, ParamAllGather.finish_param_sync

    def record_send(reducer: BucketReducer, index: int) -> Any:
        events.append(("reduce", index))
        return send(reducer, index)

    def record_wait(gather: ParamAllGather, buckets: Iterable[int] | None = None) -> None:
        chosen = list(gather._works if buckets is None else buckets)
        events.extend(("wait", index) for index in chosen if index in gather._works)
        finish_sync(gather, chosen)

    # Backward computes the gradient of the embeddings last.
    trainer.state.buffer.parameters["word_embeddings.weight"].register_post_accumulate_grad_hook(
        lambda parameter: events.append(("embedding", 0))
    )
    for i, layer in enumerate(trainer.state.model.transformer.layers):
        layer.register_forward_pre_hook(lambda module, args, i=i: events.append(("layer", i)))
    with (
        mock.patch.object(BucketReducer, "_send", record_send),
        mock.patch.object(ParamAllGather, "finish_param_sync", record_wait),
    ):
        train_step(trainer)
        events += [*(("gather", index) for index in trainer.state.param_gather._works), ("step", 1)]
        train_step(trainer)
    return events


def recorded(rank: int, world_size: int, folder: Path) -> list[tuple[list[Event], list[tuple[str, ...]]]]:
    results: list[Any] = []
    for flags in ("", SHARDED):
        trainer = begin(rank, world_size, folder, f"overlap{len(results)}", flags)
        assert trainer.context.num_microbatches == 4
        results.append((record_two_steps(trainer), [bucket.names for bucket in trainer.state.buffer.buckets]))
        finish(trainer)
    return results


def numbers_of(events: list[Event], *kinds: str) -> list[int]:
    return [number for kind, number in events if kind in kinds]


def test_communication_overlaps_with_computation(folder: Path):
    for whole, sharded in run_ranks(recorded, 2, folder):
        for events, buckets in (whole, sharded):
            cut = events.index(("step", 1))
            for step in (events[:cut], events[cut + 1 :]):
                assert numbers_of(step, "reduce") == list(range(len(buckets))), "each bucket is sent once in a step"
                ends = [i for i, (kind, _) in enumerate(step) if kind == "embedding"]
                assert len(ends) == 4 and ends[2] < step.index(("reduce", 0)) < ends[3], "while the last backward runs"
        assert not numbers_of(whole[0], "gather", "wait")
        assert numbers_of(events[:cut], "gather") == list(range(len(buckets)))[::-1], "in the order of forward"
        assert not numbers_of(events[:cut], "wait"), "nobody waits before the next forward"
        first_forward = events[cut + 1 : events.index(("layer", 1), cut) + 1]
        assert numbers_of(first_forward, "layer") == [0, 1]
        for layer in (0, 1):
            waited = numbers_of(first_forward[: first_forward.index(("layer", layer))], "wait")
            needed = {
                i
                for i, names in enumerate(buckets)
                for name in names
                if not name.startswith("transformer.layers.") or int(name.split(".")[2]) <= layer
            }
            assert sorted(waited) == sorted(needed), "the model waits once for each bucket that it needs so far"
            assert (len(waited) < len(buckets)) == (layer == 0)


def test_a_closed_run_frees_its_buffers(folder: Path):
    """Python's garbage collector does not find cycles through hooks of parameters."""
    trainer = begin(0, 1, folder, "run")
    train_step(trainer)
    finish(trainer)
    buffer = weakref.ref(trainer.state.buffer)
    del trainer
    gc.collect()
    assert buffer() is None
