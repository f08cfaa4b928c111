"""Test the ranges and shards of the buffer, and the order in which gradients are reduced and parameters are
gathered."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.gpt2.optimizer import bucket_reducer
from megatron.gpt2.optimizer.bucket_reducer import BucketReducer
from megatron.gpt2.train.train_step import train_step
from megatron.gpt2.train.trainer import Trainer
from mpu import mappings
from tests.distributed import run_ranks
from tests.megatron.gpt2.optimizer.test_distributed_optimizer import SHARDED, begin
from tests.megatron.gpt2.train.training_runs import finish, write_text

Event = tuple[str, int]


class WatchedWork:
    """The handle of a collective. It calls `on_wait` when the program waits for it."""

    def __init__(self, work: Any, on_wait: Callable[[], None]) -> None:
        self.work, self.on_wait = work, on_wait

    def wait(self) -> None:
        self.on_wait()
        self.work.wait()


class EventRecorder:
    """Records the events of two steps, (kind, number), in order."""

    all_reduce, reduce_scatter, all_gather = dist.all_reduce, mappings.reduce_scatter_single, mappings.all_gather_single

    def __init__(self, trainer: Trainer) -> None:
        self.events: list[Event] = []
        self.buffer = buffer = trainer.state.buffer
        # Backward computes the gradient of the embeddings last.
        buffer.parameters["word_embeddings.weight"].register_post_accumulate_grad_hook(
            lambda parameter: self.events.append(("embedding", 0))
        )
        for i, layer in enumerate(trainer.state.model.transformer.layers):
            layer.register_forward_pre_hook(lambda module, args, i=i: self.events.append(("layer", i)))
        with (
            mock.patch.object(dist, "all_reduce", self._reduce),
            mock.patch.object(bucket_reducer, "reduce_scatter_single", self._scatter),
            mock.patch.object(bucket_reducer, "all_gather_single", self._gather),
        ):
            train_step(trainer)
            self.events.append(("step", 1))
            train_step(trainer)
            trainer.state.param_gather.finish_param_sync()

    def bucket_with_gradients(self, grads: Tensor) -> int:
        return next(
            i for i, own in enumerate(self.buffer._grads) if own is not None and own.data_ptr() == grads.data_ptr()
        )

    def _reduce(self, sent: Tensor, **options: Any) -> Any:
        if options.get("async_op"):  # The all-reduce of the norm is synchronous.
            self.events.append(("reduce", self.bucket_with_gradients(sent)))
        return EventRecorder.all_reduce(sent, **options)

    def _scatter(self, received: Tensor, sent: Tensor, **options: Any) -> Any:
        self.events.append(("reduce" if options["async_op"] else "blocking", self.bucket_with_gradients(sent)))
        return EventRecorder.reduce_scatter(received, sent, **options)

    def _gather(self, output: Tensor, own: Tensor, **options: Any) -> Any:
        start = output.storage_offset()
        bucket = next(i for i, b in enumerate(self.buffer.buckets) if b.range.start == start)
        self.events.append(("gather" if options["async_op"] else "blocking", bucket))
        return WatchedWork(
            EventRecorder.all_gather(output, own, **options), lambda: self.events.append(("wait", bucket))
        )


def recorded(rank: int, world_size: int, folder: str) -> list[tuple[list[Event], list[tuple[str, ...]]]]:
    results: list[Any] = []
    for flags in ("", SHARDED, f"{SHARDED} --checkpoint-activations"):
        trainer = begin(rank, world_size, folder, f"overlap{len(results)}", flags)
        assert trainer.context.num_microbatches == 4
        results.append((EventRecorder(trainer).events, [bucket.names for bucket in trainer.state.buffer.buckets]))
        finish(trainer)
    return results


def numbers_of(events: list[Event], *whats: str) -> list[int]:
    return [number for what, number in events if what in whats]


def test_communication_overlaps_with_computation(tmp_path: Path):
    write_text(tmp_path)
    for whole, *sharded in run_ranks(recorded, 2, str(tmp_path)):
        for events, buckets in (whole, *sharded):
            cut = events.index(("step", 1))
            assert not numbers_of(events, "blocking")
            for step in (events[:cut], events[cut + 1 :]):
                assert numbers_of(step, "reduce") == list(range(len(buckets))), "once a step, whatever is accumulated"
                ends = [i for i, (what, _) in enumerate(step) if what == "embedding"]
                assert len(ends) == 4 and ends[2] < step.index(("reduce", 0)) < ends[3], "while the last backward runs"
        assert not numbers_of(whole[0], "gather", "wait")
        for events, buckets in sharded:
            cut = events.index(("step", 1))
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
                assert sorted(waited) == sorted(needed), "each once, all that it needs and no more"
                assert (len(waited) < len(buckets)) == (layer == 0)


def replicated_sums(rank: int, world_size: int, folder: str) -> None:
    """Run with (model-parallel, data-parallel) = (2, 2), with and without a sharded optimizer."""
    parallel = "--model-parallel-size 2 --ddp-bucket-size 7000 --sequence-parallel"
    for flags in ("", SHARDED):
        trainer = begin(rank, world_size, folder, f"tail{len(flags)}", f"{parallel} {flags}")
        buffer, p = trainer.state.buffer, trainer.parallel
        for name, parameter in buffer.parameters.items():
            is_tensor_parallel = getattr(parameter, "model_parallel", False)
            shard = buffer.local_shards[buffer.local_shard_of(name)[0]]
            assert buffer.local_shard_of(name)[1] == slice(0, 0) or (
                shard.group_key.is_tensor_parallel == is_tensor_parallel
                and shard.group_key.is_sequence_parallel != is_tensor_parallel
            ), name
        for index in range(len(buffer.buckets)):
            buffer.bucket_grads(index).fill_(1.0 + p.model_parallel_rank)
        reducer = BucketReducer(buffer, p.data_parallel_group)
        with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as spy:
            reducer.finish_grad_sync()
        replicated = [
            grad
            for grad, s in zip(buffer.shard_grads(), buffer.local_shards, strict=True)
            if not s.group_key.is_tensor_parallel
        ]
        assert [call.args[0].numel() for call in spy.call_args_list] == [sum(map(torch.numel, replicated))], (
            "one all-reduce"
        )
        assert all((grad == 3.0).all() for grad in replicated)
        assert all(
            (grad == 1.0 + p.model_parallel_rank).all()
            for grad, s in zip(buffer.shard_grads(), buffer.local_shards, strict=True)
            if s.group_key.is_tensor_parallel
        )
        finish(trainer)


def test_gradients_of_replicated_parameters_are_summed_once(tmp_path: Path):
    write_text(tmp_path)
    run_ranks(replicated_sums, 4, str(tmp_path))
