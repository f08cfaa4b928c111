"""Test that each check of this folder finds the fault for which it is made."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import mpu
from megatron.gpt2.optimizer import bucket_reducer
from megatron.gpt2.optimizer.bucket_reducer import BucketReducer
from megatron.gpt2.optimizer.optimizer import MixedPrecisionOptimizer
from megatron.gpt2.train import data, train_step
from megatron.gpt2.train.forward_backward import ForwardBackward
from mpu import layers, transformer
from mpu.activation_offload import ActivationOffload
from tests.fake_cuda.fake_gpu import FakeStream
from tests.fake_cuda.program import check_budget, check_same_order, check_step, communication, cost, running, steps
from tests.fake_cuda.test_steps import LAYOUTS

Check = Callable[[Path, Path], None]
Plant = Callable[[pytest.MonkeyPatch], None]


def step(text: Path, save: Path) -> None:
    with running(text, save) as (trainer, gpu):
        check_step(trainer, gpu)
        check_budget("bf16", cost(gpu))


def one_rank(flags: str) -> Check:
    """Check a step of the first of two ranks."""

    def check(text: Path, save: Path) -> None:
        with running(text, save, flags, world_size=2) as (trainer, gpu):
            check_step(trainer, gpu)

    return check


data_parallel, tensor_parallel = one_rank(""), one_rank("--model-parallel-size 2")
sharded = one_rank("--use-distributed-optimizer")


def groups(text: Path, save: Path) -> None:
    size, flags = LAYOUTS["both"]
    with running(text, save, flags, rank=size - 1, world_size=size) as (trainer, gpu):
        steps(trainer, gpu)
        check_budget(f"both, {size} ranks", communication(trainer, gpu))


def ranks(text: Path, save: Path) -> None:
    check_same_order(text, save, "--model-parallel-size 2 --sequence-parallel", 2)


def stages(text: Path, save: Path) -> None:
    check_same_order(text, save, "--pipeline-model-parallel-size 2 --global-batch-size 8", 2)


def parked(text: Path, save: Path) -> None:
    with running(text, save, "--num-layers 3 --recompute-granularity full --checkpoint-in-cpu") as (trainer, gpu):
        check_step(trainer, gpu)


def before(owner: Any, name: str, extra: Callable[..., object]) -> Plant:
    """Make `owner.name` call `extra` first, with the same arguments."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        original = getattr(owner, name)

        def both(*args: Any, **kwargs: Any) -> Any:
            extra(*args, **kwargs)
            return original(*args, **kwargs)

        patch.setattr(owner, name, both)

    return plant


def instead(owner: Any, name: str, other: Callable[..., object]) -> Plant:
    """Replace `owner.name` by `other` during the test."""
    return lambda patch: patch.setattr(owner, name, other)


def before_update(extra: Callable[[MixedPrecisionOptimizer], object]) -> Plant:
    return before(MixedPrecisionOptimizer, "step", extra)


def before_counting(extra: Callable[[Tensor], object]) -> Plant:
    """Call `extra` with the mask of the batch before the tokens are counted."""
    return before(train_step, "tokens_in_global_batch", lambda trainer, batch: extra(batch.mask))


class NoWait:
    """Stands for the work of a collective, and does not wait for it."""

    def wait(self) -> bool:
        return True


def without_wait(owner: Any, name: str) -> Plant:
    """Let nobody wait for the asynchronous calls of the collective `owner.name`."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        original = getattr(owner, name)

        def call(*args: Any, async_op: bool = False, **kwargs: Any) -> Any:
            work = original(*args, async_op=async_op, **kwargs)
            return NoWait() if async_op else work

        patch.setattr(owner, name, call)

    return plant


def on_another_stream(owner: Any, name: str) -> Plant:
    """Run a method on a stream that nothing waits for."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        original = getattr(owner, name)

        def call(*args: Any) -> Any:
            with torch.cuda.stream(torch.cuda.Stream()):
                return original(*args)

        patch.setattr(owner, name, call)

    return plant


def synchronize_event(optimizer: MixedPrecisionOptimizer) -> None:
    event = torch.cuda.Event()
    event.record()
    event.synchronize()


def unbatched(sends: Any, receives: Any, group: Any) -> tuple[list[mpu.Transfer], list[mpu.Transfer]]:
    """Replace `mpu.batched_p2p_ops`."""
    sent = [mpu.Transfer(x, [dist.isend(x, group=group, group_dst=peer)]) for x, peer in sends]
    return sent, [mpu.Transfer(x, [dist.irecv(x, group=group, group_src=peer)]) for x, peer in receives]


def reuse_pinned_batch(patch: pytest.MonkeyPatch) -> None:
    original = data.TrainingData.to_device

    def to_device(self: data.TrainingData, text: Tensor, samples: Tensor) -> data.Batch:
        batch = original(self, text, samples)
        text.zero_()
        return batch

    patch.setattr(data.TrainingData, "to_device", to_device)


def two_groups_in_another_order_on_rank_1(optimizer: MixedPrecisionOptimizer) -> None:
    both = [None, mpu.get_tensor_model_parallel_group()]
    for group in both if dist.get_rank() == 1 else both[::-1]:
        dist.all_reduce(optimizer.found_inf, group=group)


def on_gpu(*shape: int) -> Tensor:
    return torch.zeros(*shape, device="cuda")


# Each case has the check, the planted fault, and the expected message.
FAULTS: dict[str, tuple[Check, Plant, str]] = {
    "a value is read": (step, before_update(lambda self: self.found_inf.item()), "reads a value"),
    "a batch that is not pinned": (step, instead(data, "pin_tensor", torch.from_numpy), "copies .* from cpu to cuda"),
    "a tensor on the wrong device": (
        step,
        before_counting(lambda mask: mask + torch.ones(256)),
        "found (at least )?two( different)? devices",
    ),
    "a copy in each layer": (
        step,
        before(transformer.FusedTransformerLayer, "forward", lambda self, x, *_, **__: x.clone()),
        "'clone': '5, granted 3'",
    ),
    "a CPU tensor in a collective": (ranks, before_update(lambda self: dist.all_reduce(torch.zeros(2))), "on the CPU"),
    "a tensor in a collective that is not contiguous": (
        ranks,
        before_update(lambda self: dist.all_reduce(on_gpu(4, 4).t())),
        "not contiguous",
    ),
    "a collective that only one rank calls": (
        ranks,
        before_update(lambda self: dist.all_reduce(self.found_inf) if dist.get_rank() == 1 else None),
        "rank 1 waits in allreduce.*rank 0 does not come",
    ),
    "the main stream does not wait for copies": (
        parked,
        instead(ActivationOffload, "wait", lambda self, done: None),
        "before it is there.*|while another stream uses it",
    ),
    "copies do not wait for the main stream": (
        parked,
        instead(FakeStream, "wait_stream", lambda self, other: None),
        r"reads \(\d+,\) before it is there",
    ),
    "a send that nobody receives": (
        stages,
        before(
            ForwardBackward,
            "_backward",
            lambda self, action: dist.send(on_gpu(2), dst=0) if dist.get_rank() == 1 else None,
        ),
        "rank 1 waits in send.*rank 0 does not come",
    ),
    "a branch on a tensor": (
        step,
        before_update(lambda self: self.found_inf.zero_() if self.found_inf > 0 else None),
        "reads a value",
    ),
    "a tensor for a list of tensors": (
        step,
        before_update(lambda self: torch._foreach_add_([self.found_inf.clone()], self.found_inf)),
        "reads a value for a list",
    ),
    "a mask as an index": (step, before_counting(lambda mask: mask[mask > 0]), "nonzero"),
    "torch.cuda.synchronize": (step, before_update(lambda self: torch.cuda.synchronize()), "synchronizes the device"),
    "Event.synchronize": (step, before_update(synchronize_event), "synchronizes an event"),
    "Stream.synchronize": (
        step,
        before_update(lambda self: torch.cuda.current_stream().synchronize()),
        "synchronizes a stream",
    ),
    "a batch that a side stream copies without an event": (
        step,
        on_another_stream(data.TrainingData, "to_device"),
        "before it is there",
    ),
    "no wait for the all-reduce of gradients": (
        data_parallel,
        without_wait(dist, "all_reduce"),
        "reads what is received by allreduce.*bucket_reducer.py",
    ),
    "no wait for the all-reduce of dX": (
        tensor_parallel,
        without_wait(dist, "all_reduce"),
        "reads what is received by allreduce.*layers.py",
    ),
    "no wait for the all-gather of parameters": (
        sharded,
        without_wait(bucket_reducer, "all_gather_single"),
        "reads what is received by _?allgather.*bucket_reducer.py",
    ),
    "no wait for a transfer between stages": (
        stages,
        instead(mpu.Transfer, "wait", lambda self: self.tensor),
        "reads what is received by recv.*p2p_communication.py",
    ),
    "opposing transfers without a batch": (
        stages,
        instead(mpu, "batched_p2p_ops", unbatched),
        "rank 0 waits in send.*rank 1 does not come",
    ),
    "a sum of dX over the wrong group": (
        groups,
        before(layers._Linear, "backward", lambda ctx, dy: setattr(ctx, "group", dist.group.WORLD)),
        "'world: allreduce",
    ),
    # Own faults, in addition to those of an audit
    "the host overwrites a pinned batch on its way": (step, reuse_pinned_batch, "on the host writes"),
    "the host reads a copy on its way": (
        step,
        before_update(lambda self: self.found_inf.to("cpu", non_blocking=True) + 1),
        r"on the host reads \(\) before it is there",
    ),
    "another stream waits for a collective": (
        data_parallel,
        on_another_stream(BucketReducer, "_arrived"),
        "before it is there",
    ),
    "two groups in different orders": (
        ranks,
        before_update(two_groups_in_another_order_on_rank_1),
        "(?s)rank 0 waits in allreduce.*rank 1 waits in allreduce",
    ),
}


def test_nothing_is_found_if_nothing_is_planted(text: Path, tmp_path: Path):
    for number, check in enumerate({check for check, _, _ in FAULTS.values()}):
        check(text, tmp_path / str(number))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(text: Path, tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch):
    check, plant, said = FAULTS[fault]
    monkeypatch.delenv("RECORD_BUDGETS", raising=False)
    plant(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError), match=said):
        check(text, tmp_path)
