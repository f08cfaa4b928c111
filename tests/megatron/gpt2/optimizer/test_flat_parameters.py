"""The flat buffer's own arithmetic; when gradients are reduced, parameters gathered and both waited for."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.gpt2.optimizer import gradient_reducer
from megatron.gpt2.optimizer.flat_parameters import FlatParameters
from megatron.gpt2.optimizer.gradient_reducer import GradientReducer
from megatron.gpt2.train.run import Run
from megatron.gpt2.train.train_step import train_step
from mpu import mappings
from tests.distributed import run_ranks
from tests.megatron.gpt2.optimizer.test_distributed_optimizer import SHARDED, begin
from tests.megatron.gpt2.train.training_runs import finish, write_text


def calls_of_a_step(parameters: int) -> int:
    """Python's calls in what a step and a save ask of a buffer with as many buckets and owned ranges as parameters."""
    calls = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    model = nn.ParameterList(nn.Parameter(torch.full((1,), float(i))) for i in range(parameters))
    sys.setprofile(count)
    try:
        flat = FlatParameters(model, torch.float32, bucket_size=1)
        grads = flat.owned_grads()
        parts = {name: flat.owned_part_of(name) for name in flat.ranges}
    finally:
        sys.setprofile(None)
    assert len(grads) == len(flat.owned) == len(flat.buckets) == parameters
    for name, (index, part, start) in parts.items():
        assert flat.masters[index][part].item() == float(name) and start == 0
    return calls


def test_a_step_is_linear_in_the_owned_ranges() -> None:
    """Anything quadratic would be a hundred times this."""
    assert calls_of_a_step(10_000) < 100 * 10_000


def test_what_a_shard_owns_of_a_parameter() -> None:
    """All shards together own every element once."""
    model = nn.ParameterDict(
        {
            "a": nn.Parameter(torch.arange(300.0).view(30, 10)),
            "b": nn.Parameter(torch.arange(7.0)),
            "c": nn.Parameter(torch.arange(129.0).view(43, 3)),
        }
    )
    seen = {name: torch.zeros(parameter.numel()) for name, parameter in model.items()}
    for rank in range(4):
        flat = FlatParameters(
            nn.ParameterDict({name: nn.Parameter(p.detach().clone()) for name, p in model.items()}),
            torch.float32,
            bucket_size=350,
            ranks=(rank, 4),
            sharded=True,
        )
        for name, parameter in model.items():
            index, part, start = flat.owned_part_of(name)
            length = part.stop - part.start
            seen[name][start : start + length] += 1
            assert torch.equal(
                flat.masters[index][part] if length else torch.empty(0),
                parameter.detach().flatten()[start : start + length],
            )
    assert all((count == 1).all() for count in seen.values())


Event = tuple[str, int]


class Watched:
    """The handle of a collective, which tells when it is waited for."""

    def __init__(self, work: Any, told: Callable[[], None]) -> None:
        self.work, self.told = work, told

    def wait(self) -> None:
        self.told()
        self.work.wait()


class Recorder:
    """(what, which) of two steps of a run, in the order in which they happened."""

    all_reduce, reduce_scatter, all_gather = dist.all_reduce, mappings.reduce_scatter_single, mappings.all_gather_single

    def __init__(self, run: Run) -> None:
        self.events: list[Event] = []
        self.flat = flat = run.engine.flat
        # The embeddings' gradient is the last to be ready.
        flat.parameters["word_embeddings.weight"].register_post_accumulate_grad_hook(
            lambda parameter: self.events.append(("embedding", 0))
        )
        for i, layer in enumerate(run.engine.model.transformer.layers):
            layer.register_forward_pre_hook(lambda module, args, i=i: self.events.append(("layer", i)))
        with (
            mock.patch.object(dist, "all_reduce", self._reduce),
            mock.patch.object(gradient_reducer, "reduce_scatter_single", self._scatter),
            mock.patch.object(gradient_reducer, "all_gather_single", self._gather),
        ):
            train_step(run)
            self.events.append(("step", 1))
            train_step(run)
            run.engine.gatherer.wait()

    def bucket_with_gradients(self, grads: Tensor) -> int:
        return next(
            i for i, own in enumerate(self.flat._grads) if own is not None and own.data_ptr() == grads.data_ptr()
        )

    def _reduce(self, sent: Tensor, **options: Any) -> Any:
        if options.get("async_op"):  # the norm is summed at once
            self.events.append(("reduce", self.bucket_with_gradients(sent)))
        return Recorder.all_reduce(sent, **options)

    def _scatter(self, received: Tensor, sent: Tensor, **options: Any) -> Any:
        self.events.append(("reduce" if options["async_op"] else "blocking", self.bucket_with_gradients(sent)))
        return Recorder.reduce_scatter(received, sent, **options)

    def _gather(self, output: Tensor, own: Tensor, **options: Any) -> Any:
        start = output.storage_offset()
        bucket = next(i for i, b in enumerate(self.flat.buckets) if b.range.start == start)
        self.events.append(("gather" if options["async_op"] else "blocking", bucket))
        return Watched(Recorder.all_gather(output, own, **options), lambda: self.events.append(("wait", bucket)))


def recorded(rank: int, world_size: int, folder: str) -> list[tuple[list[Event], list[tuple[str, ...]]]]:
    results: list[Any] = []
    for flags in ("", SHARDED, f"{SHARDED} --checkpoint-activations"):
        run = begin(rank, world_size, folder, f"overlap{len(results)}", flags)
        assert run.prepared.micro_batches == 4
        results.append((Recorder(run).events, [bucket.names for bucket in run.engine.flat.buckets]))
        finish(run)
    return results


def which(events: list[Event], *whats: str) -> list[int]:
    return [number for what, number in events if what in whats]


def test_communication_overlaps_with_computation(tmp_path: Path):
    write_text(tmp_path)
    for whole, *sharded in run_ranks(recorded, 2, str(tmp_path)):
        for events, buckets in (whole, *sharded):
            cut = events.index(("step", 1))
            assert not which(events, "blocking")
            for step in (events[:cut], events[cut + 1 :]):
                assert which(step, "reduce") == list(range(len(buckets))), "once a step, whatever is accumulated"
                ends = [i for i, (what, _) in enumerate(step) if what == "embedding"]
                assert len(ends) == 4 and ends[2] < step.index(("reduce", 0)) < ends[3], "while the last backward runs"
        assert not which(whole[0], "gather", "wait")
        for events, buckets in sharded:
            cut = events.index(("step", 1))
            assert which(events[:cut], "gather") == list(range(len(buckets)))[::-1], "in the order of forward"
            assert not which(events[:cut], "wait"), "nobody waits before the next forward"
            first_forward = events[cut + 1 : events.index(("layer", 1), cut) + 1]
            assert which(first_forward, "layer") == [0, 1]
            for layer in (0, 1):
                waited = which(first_forward[: first_forward.index(("layer", layer))], "wait")
                needed = {
                    i
                    for i, names in enumerate(buckets)
                    for name in names
                    if not name.startswith("transformer.layers.") or int(name.split(".")[2]) <= layer
                }
                assert sorted(waited) == sorted(needed), "each once, all that it needs and no more"
                assert (len(waited) < len(buckets)) == (layer == 0)


def replicated_sums(rank: int, world_size: int, folder: str) -> None:
    """At (model-parallel, data-parallel) = (2, 2), whole and sharded."""
    parallel = "--model-parallel-size 2 --ddp-bucket-size 7000 --sequence-parallel"
    for flags in ("", SHARDED):
        run = begin(rank, world_size, folder, f"tail{len(flags)}", f"{parallel} {flags}")
        flat, p = run.engine.flat, run.parallel
        for name, parameter in flat.parameters.items():
            is_split = getattr(parameter, "model_parallel", False)
            segment = flat.owned[flat.owned_part_of(name)[0]]
            assert flat.owned_part_of(name)[1] == slice(0, 0) or (
                segment.is_split == is_split and segment.is_partial != is_split
            ), name
        for index in range(len(flat.buckets)):
            flat.bucket_grads(index).fill_(1.0 + p.model_parallel_rank)
        reducer = GradientReducer(flat, p.data_parallel_group)
        with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as spy:
            reducer.finish()
        replicated = [grad for grad, s in zip(flat.owned_grads(), flat.owned, strict=True) if not s.is_split]
        assert [call.args[0].numel() for call in spy.call_args_list] == [sum(map(torch.numel, replicated))], (
            "one all-reduce"
        )
        assert all((grad == 3.0).all() for grad in replicated)
        assert all(
            (grad == 1.0 + p.model_parallel_rank).all()
            for grad, s in zip(flat.owned_grads(), flat.owned, strict=True)
            if s.is_split
        )
        finish(run)


def test_gradients_of_replicated_parameters_are_summed_once(tmp_path: Path):
    write_text(tmp_path)
    run_ranks(replicated_sums, 4, str(tmp_path))
