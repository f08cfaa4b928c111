"""Every asynchronous collective and transfer is waited for before its result is used.

On a CPU a result is usually there before anyone looks, so a missed wait changes nothing. Here the result of each
asynchronous operation is NaN until `wait` is called.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import mpu
from megatron.gpt2.optimizer import bucket_reducer
from mpu import mappings
from tests.distributed import run_ranks
from tests.megatron.gpt2.train.training_runs import finish, start, steps, write_text


class LateWork:
    """The handle of an asynchronous operation on private tensors. `wait` copies them to those of the program."""

    def __init__(self, work: Any, results: Sequence[tuple[Tensor, Tensor]], *, ignored: bool) -> None:
        self.work, self.results, self.ignored = work, results, ignored
        for result, _ in results:
            result.fill_(torch.nan)

    def wait(self) -> None:
        self.work.wait()
        for result, private in self.results if not self.ignored else ():
            result.copy_(private)


@contextlib.contextmanager
def late_results(group: str, operation: str) -> Iterator[list[tuple[str, str]]]:
    """Make the results of all asynchronous operations late. Yield a list of their (group, operation).

    If both arguments are given, a wait for this operation has no effect, as if the program did not call it.
    """
    seen: list[tuple[str, str]] = []

    def late(work: Any, results: Sequence[tuple[Tensor, Tensor]], of: str, name: str) -> LateWork:
        seen.append((of, name))
        return LateWork(work, results, ignored=(of, name) == (group, operation))

    def group_name(process_group: Any) -> str:
        state = mpu.get_parallel_state()
        groups = {"tensor": state.tensor_model_parallel_group, "data": state.data_parallel_group}
        return next((name for name, one in groups.items() if one is process_group), "pipeline")

    def collective(name: str) -> Callable[..., Any]:
        def call(output: Tensor, *given: Tensor, group: Any = None, async_op: bool = False, **options: Any) -> Any:
            if not async_op:
                return real[name](output, *given, group=group, **options)
            private = output.clone()
            work = real[name](private, *(x.clone() for x in given), group=group, async_op=True, **options)
            return late(work, [(output, private)], group_name(group), name)

        return call

    def batch_isend_irecv(operations: Sequence[dist.P2POp]) -> list[LateWork]:
        results = []
        for one in operations:
            visible, one.tensor = one.tensor, one.tensor.clone()
            results.append([(visible, one.tensor)] if one.op is dist.irecv else [])
        works = real["batch_isend_irecv"](operations)
        return [
            late(work, result, "pipeline", "receive" if result else "send")
            for work, result in zip(works, results, strict=True)
        ]

    real: dict[str, Callable[..., Any]] = {
        "all_reduce": dist.all_reduce,
        "all_gather": mappings.all_gather_single,
        "reduce_scatter": mappings.reduce_scatter_single,
        "batch_isend_irecv": dist.batch_isend_irecv,
    }
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(dist, "all_reduce", collective("all_reduce")))
        stack.enter_context(mock.patch.object(dist, "batch_isend_irecv", batch_isend_irecv))
        for module in (mappings, bucket_reducer):
            for name in ("all_gather", "reduce_scatter"):
                stack.enter_context(mock.patch.object(module, f"{name}_single", collective(name)))
        yield seen


LAYOUTS = {  # flags, and the operations that the program must wait for
    "data": ("", [("data", "all_reduce")]),
    "sharded": ("--use-distributed-optimizer", [("data", "reduce_scatter"), ("data", "all_gather")]),
    "zero 2": ("--zero-stage 2 --global-batch-size 16", [("data", "reduce_scatter"), ("data", "all_gather")]),
    "tensor": ("--model-parallel-size 2", [("tensor", "all_reduce")]),
    "sequence": (
        "--model-parallel-size 2 --sequence-parallel",
        [("tensor", "all_gather"), ("tensor", "reduce_scatter")],
    ),
    "pipeline": ("--pipeline-model-parallel-size 2 --micro-batch-size 2", [("pipeline", "receive")]),
}


def losses(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Losses and gradient norms of three steps in each layout: as the program is, with late results, and with late
    results and one missed wait. The result also has the operations that were late."""
    found = {}
    for name, (flags, operations) in LAYOUTS.items():

        def run(group: str = "", operation: str = "", *, is_late: bool = True) -> tuple[str, set[tuple[str, str]]]:
            line = f"--global-batch-size 8 --micro-batch-size 4 --save {folder}/waits {flags}"  # noqa: B023
            trainer = start(rank, world_size, folder, line)
            seen: list[tuple[str, str]] = []
            with contextlib.ExitStack() as stack:
                if is_late:
                    seen = stack.enter_context(late_results(group, operation))
                of_steps = steps(trainer, 3)
            finish(trainer)
            return str((of_steps["loss"], of_steps["norm"])), set(seen)

        expected, _ = run(is_late=False)
        waited, seen = run()
        found[name] = expected, waited, seen, {each: run(*each)[0] for each in operations}
    return found


def test_a_missed_wait_is_noticed(tmp_path: Path):
    write_text(tmp_path)
    for found in run_ranks(losses, 2, str(tmp_path), timeout=90):
        for name, (expected, waited, seen, missed) in found.items():
            assert waited == expected, f"{name}: a result is used before the wait"
            assert seen >= missed.keys() and "nan" not in expected
            for operation, wrong in missed.items():
                assert "nan" in wrong, f"{name}: nobody notices a missed wait for {operation}"
