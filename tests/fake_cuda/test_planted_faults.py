"""A check in tests/fake_cuda finds each planted fault."""

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
from megatron.gpt2.optimizer.optimizer import MixedPrecisionOptimizer
from megatron.gpt2.train import data, train_step
from megatron.gpt2.train.forward_backward import ForwardBackward
from mpu import layers, transformer
from mpu.activation_offload import ActivationOffload
from tests.fake_cuda.fake_gpu import FakeStream
from tests.fake_cuda.program import check_budget, check_same_order, check_step, communication, cost, running, steps
from tests.fake_cuda.test_steps import LAYOUTS
from tests.megatron.gpt2.extensions.order.test_order import changed, extra, replaced, without_wait

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


def before_update(call: Callable[[MixedPrecisionOptimizer], object]) -> Plant:
    return extra(MixedPrecisionOptimizer, "step", call)


def before_counting(call: Callable[[Tensor], object]) -> Plant:
    """Call `call` with the mask of the batch before the tokens are counted."""
    return extra(train_step, "tokens_in_global_batch", lambda trainer, batch: call(batch.mask))


def on_another_stream(original: Any, *args: Any) -> Any:
    """Run a method on a stream that nothing waits for."""
    with torch.cuda.stream(torch.cuda.Stream()):
        return original(*args)


def synchronize_event(optimizer: MixedPrecisionOptimizer) -> None:
    event = torch.cuda.Event()
    event.record()
    event.synchronize()


def unbatched(sends: Any, receives: Any, group: Any) -> tuple[list[mpu.Transfer], list[mpu.Transfer]]:
    """Replace `mpu.batched_p2p_ops`."""
    sent = [mpu.Transfer(x, [dist.isend(x, group=group, group_dst=peer)]) for x, peer in sends]
    return sent, [mpu.Transfer(x, [dist.irecv(x, group=group, group_src=peer)]) for x, peer in receives]


def reuse_pinned_batch(original: Any, self: data.TrainingData, text: Tensor, samples: Tensor) -> data.Batch:
    batch: data.Batch = original(self, text, samples)
    text.zero_()
    return batch


def two_groups_in_another_order_on_rank_1(optimizer: MixedPrecisionOptimizer) -> None:
    both = [None, mpu.get_tensor_model_parallel_group()]
    for group in both if dist.get_rank() == 1 else both[::-1]:
        dist.all_reduce(optimizer.found_inf, group=group)


def on_gpu(*shape: int) -> Tensor:
    return torch.zeros(*shape, device="cuda")


# Each case has the check, the planted fault, and the expected message.
FAULTS: dict[str, tuple[Check, Plant, str]] = {
    "a value is read": (step, before_update(lambda self: self.found_inf.item()), "reads a value"),
    "a batch that is not pinned": (step, replaced(data, "pin_tensor", torch.from_numpy), "copies .* from cpu to cuda"),
    "a tensor on the wrong device": (
        step,
        before_counting(lambda mask: mask + torch.ones(256)),
        "found (at least )?two( different)? devices",
    ),
    "a copy in each layer": (
        step,
        extra(transformer.ParallelSelfAttention, "split_heads", lambda self, qkv: qkv.clone()),
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
        replaced(ActivationOffload, "wait", lambda self, done: None),
        "before it is there.*|while another stream uses it",
    ),
    "copies do not wait for the main stream": (
        parked,
        replaced(FakeStream, "wait_stream", lambda self, other: None),
        r"reads \(\d+,\) before it is there",
    ),
    "a send that nobody receives": (
        stages,
        extra(
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
        "reads a value",
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
        changed(data.TrainingData, "to_device", on_another_stream),
        "before it is there",
    ),
    "another stream waits for a collective": (
        data_parallel,
        changed(bucket_reducer.BucketReducer, "_wait_for_bucket", on_another_stream),
        "before it is there",
    ),
    "no wait for the all-reduce of gradients": (
        data_parallel,
        changed(dist, "all_reduce", without_wait),
        "grads.py.* reads what is received by allreduce",
    ),
    "no wait for the all-reduce of dX": (
        tensor_parallel,
        changed(dist, "all_reduce", without_wait),
        "layer.py.* reads what is received by allreduce",
    ),
    "no wait for the all-gather of parameters": (
        sharded,
        changed(bucket_reducer, "all_gather_single", without_wait),
        "layers.py.* reads what is received by _?allgather",
    ),
    "no wait for a transfer between stages": (
        stages,
        replaced(mpu.Transfer, "wait", lambda self: self.tensor),
        "reads what is received by recv.*p2p_communication.py",
    ),
    "opposing transfers without a batch": (
        stages,
        replaced(mpu, "batched_p2p_ops", unbatched),
        "rank 0 waits in send.*rank 1 does not come",
    ),
    "a sum of dX over the wrong group": (
        groups,
        extra(layers._Linear, "backward", lambda ctx, dy, *_: setattr(ctx, "group", dist.group.WORLD)),
        "'world: allreduce",
    ),
    "the host overwrites a pinned batch on its way": (
        step,
        changed(data.TrainingData, "to_device", reuse_pinned_batch),
        "on the host writes",
    ),
    "the host reads a copy on its way": (
        step,
        before_update(lambda self: self.found_inf.to("cpu", non_blocking=True) + 1),
        r"on the host reads \(\) before it is there",
    ),
    "two groups in different orders": (
        ranks,
        before_update(two_groups_in_another_order_on_rank_1),
        "(?s)rank 0 waits in allreduce.*rank 1 waits in allreduce",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(text: Path, tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch):
    check, plant, said = FAULTS[fault]
    monkeypatch.delenv("RECORD_BUDGETS", raising=False)
    plant(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError), match=said):
        check(text, tmp_path)
