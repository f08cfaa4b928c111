"""Test prove-order: it finds no fault in any layout, and names the line of each planted fault."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import mpu
from megatron.gpt2.config.arguments import parse
from megatron.gpt2.dist.gathering import gather_rows, gather_strings
from megatron.gpt2.dist.signals import StopSignal
from megatron.gpt2.extensions.order import RankRecord, command, prove, record
from megatron.gpt2.optimizer import bucket_reducer
from megatron.gpt2.optimizer.bucket_reducer import BucketReducer
from megatron.gpt2.train import checkpointing, data, loop
from megatron.gpt2.train.checkpointing import CheckpointManager
from megatron.gpt2.train.forward_backward import ForwardBackward
from mpu import mappings

ROOT = Path(__file__).resolve().parents[5]
SMALL = (
    "--num-layers 4 --hidden-size 1024 --num-attention-heads 16 --train-data x --train-iters 9 --hidden-dropout 0 "
    "--attention-dropout 0 --micro-batch-size 1 --eval-iters 1"
)
SHARDED = "--use-distributed-optimizer"
Patch = pytest.MonkeyPatch


def story_of(
    flags: str, world_size: int, plant: Callable[[Patch], object] = lambda patch: None, ranks: tuple[int, ...] = ()
) -> str:
    """Record a training run in which `plant` makes a fault on `ranks`. Return the lines that explain the fault."""
    real = command.run

    def run(values: dict[str, Any], rank: int, size: int) -> None:
        with Patch.context() as patch:
            if size > 1 and rank in ranks:
                plant(patch)
            real(values, rank, size)

    with mock.patch.object(command, "run", run):
        return "\n".join(prove(command.record_layout(parse(f"{SMALL} {flags}".split()), world_size)))


# --- layouts


class Layout(NamedTuple):
    tensor: int
    pipeline: int
    data: int
    schedule: str
    sharding: str
    sequence: str
    micro_batches: int

    @property
    def world_size(self) -> int:
        return self.tensor * self.pipeline * self.data

    @property
    def is_possible(self) -> bool:
        return (
            2 <= self.world_size <= 64
            and (self.pipeline > 1 or self.schedule == "1f1b")
            and not (self.pipeline > 1 and "gradients" in self.sharding)
            and (self.tensor > 1 or not self.sequence)
        )

    @property
    def flags(self) -> str:
        virtual = "--num-virtual-stages-per-pipeline-rank 2" if self.schedule == "interleaved" else ""
        return (
            f"--model-parallel-size {self.tensor} --pipeline-model-parallel-size {self.pipeline} --pipeline-schedule "
            f"{self.schedule} {virtual} {self.sharding} {self.sequence} --num-layers {max(2, 2 * self.pipeline)} "
            f"--global-batch-size {self.micro_batches * self.data}"
        )


def covering_layouts() -> list[Layout]:
    """Return layouts in which each possible pair of values occurs, preferably with few ranks."""
    sharding = ("", SHARDED, f"{SHARDED} --shard-gradients")
    sizes, schedules, sequence = (1, 2, 4, 8), ("1f1b", "interleaved", "zero-bubble"), ("", "--sequence-parallel")
    every = itertools.product(sizes, sizes, (*sizes, 16), schedules, sharding, sequence, (1, 3, 4))
    possible = (layout for layout in map(Layout._make, every) if layout.is_possible)
    left = {layout: set(itertools.combinations(enumerate(layout), 2)) for layout in possible}
    chosen = []
    while any(left.values()):
        chosen.append(best := max(left, key=lambda layout: len(left[layout]) / layout.world_size))
        covered = set(left[best])
        for pairs in left.values():
            pairs -= covered
    return chosen


@pytest.mark.parametrize(
    "flags, world_size",
    [
        (Layout(2, 2, 1, "zero-bubble", "", "--sequence-parallel", 3).flags, 4),
        (Layout(2, 1, 2, "1f1b", "", "", 3).flags, 4),
        (Layout(1, 1, 2, "1f1b", f"{SHARDED} --shard-gradients", "", 3).flags, 2),
        *(
            # A layout of more than 8 ranks takes 10 to 25 s of one core.
            pytest.param(flags, world_size, marks=pytest.mark.wide if world_size <= 8 else pytest.mark.slow)
            for flags, world_size in (
                *((layout.flags, layout.world_size) for layout in covering_layouts()),
                ("--model-parallel-size 2 --exact-layouts 2 --dropout-rng counter --global-batch-size 4", 4),
                ("--keep-best --async-save --eod-mask-loss --check-replicas-interval 1 --log-straggler", 2),
                ("--model-parallel-size 2 --recompute-granularity full --partition-activations", 4),
                ("--grad-reduce-in-bf16 --precision bf16 --rewind-on-spike", 2),
            )
        ),
    ],
)
def test_a_layout_is_proven(flags: str, world_size: int):
    assert story_of(flags, world_size) == ""


def test_a_program_of_the_user(monkeypatch: Patch, capsys: pytest.CaptureFixture[str]):
    """Without `batch_isend_irecv`, gloo sends and receives at the same time, but NCCL receives only after it has
    sent."""
    records: list[RankRecord] = []
    for rank in range(2):
        with record(rank, 2, records):
            dist.init_process_group("nccl")
            texts = [""] * 2
            dist.all_gather_object(texts, f"from rank {rank}")
            assert texts == ["from rank 0"] * 2
            works = [dist.isend(torch.zeros(2), 1 - rank), dist.irecv(torch.zeros(2), 1 - rank)]
            for work in works:
                work.wait()
    assert prove(records, ["gloo"]) == []
    monkeypatch.setattr(command, "record_layout", lambda *_: records)
    assert command.main(["--nproc-per-node", "2"]) == 1
    line = line_numbers(HERE, "works = [dist.isend(")[0]
    for rank, story in enumerate(capsys.readouterr().out.splitlines()):
        assert story.startswith(f"rank {rank} waits in send") and f"{HERE}:{line}" in story
    with pytest.raises(ValueError, match="each rank"):
        prove(records[:1])


def line_numbers(file: str, text: str) -> list[int]:
    return [number for number, line in enumerate((ROOT / file).read_text().splitlines(), 1) if text in line]


# --- faults


def extra(owner: Any, name: str, call: Callable[..., object], *, after: bool = False) -> Callable[[Patch], None]:
    """Make `owner.name` first call `call` with its arguments. With `after`, `call` runs last, and its first argument is
    the result."""

    def both(original: Any, *args: Any, **options: Any) -> Any:
        if not after:
            call(*args, **options)
        result = original(*args, **options)
        if after:
            call(result, *args, **options)
        return result

    return changed(owner, name, both)


def changed(owner: Any, name: str, new: Callable[..., Any]) -> Callable[[Patch], None]:
    """Replace the function owner.name by one that calls `new` with the original function and the arguments."""

    def plant(patch: Patch) -> None:
        # A partial object adds no frame to the location of a call, but does not become a method.
        replacement = functools.partial(new, getattr(owner, name))
        is_method = isinstance(owner, type)
        patch.setattr(owner, name, (lambda *args, **more: replacement(*args, **more)) if is_method else replacement)

    return plant


def replaced(owner: Any, name: str, value: Any) -> Callable[[Patch], None]:
    return lambda patch: patch.setattr(owner, name, value)


def without_wait(original: Any, *args: Any, **options: Any) -> Any:
    """Start an asynchronous operation. Return a handle whose `wait` does nothing."""
    out, ignored = original(*args, **options), SimpleNamespace(wait=lambda: None)
    return [ignored] * len(out) if isinstance(out, list) else ignored if options.get("async_op") else out


def without_wait_for_floats(original: Any, x: torch.Tensor, **options: Any) -> Any:
    return without_wait(original, x, **options) if x.is_floating_point() else original(x, **options)


def interleaved(*_: Any) -> None:
    """Two ranks use two groups in the opposite order of the other ranks (torchrec #4149)."""
    state = mpu.get_parallel_state()
    groups = [state.tensor_model_parallel_group, state.data_parallel_group]
    if state.rank in (1, 2):
        groups.reverse()
    works = [dist.all_reduce(torch.zeros(4), group=group, async_op=True) for group in groups]
    for work in works:
        work.wait()


def opposing_sends(*_: Any) -> None:
    dist.send(torch.zeros(4), 1 - dist.get_rank())  # Each rank sends before it receives.
    dist.recv(torch.zeros(4), 1 - dist.get_rank())


class Fault(NamedTuple):
    """A fault that is planted in `ranks`.

    file, line: the file and the text of a line that the report must name.
    """

    plant: Callable[[Patch], object]
    file: str
    line: str
    flags: str = ""
    world_size: int = 2
    ranks: tuple[int, ...] = (1,)


HERE = "tests/megatron/gpt2/extensions/order/test_order.py"
REDUCER = "megatron/gpt2/optimizer/bucket_reducer.py"
GATHERING, P2P, SIGNALS = "megatron/gpt2/dist/gathering.py", "mpu/p2p_communication.py", "megatron/gpt2/dist/signals.py"
SUM = "work = dist.all_reduce(sent, group=self._group, async_op=True)"
TENSOR, PIPELINE = "--model-parallel-size 2", "--pipeline-model-parallel-size 2"
END = StopSignal, "close"
FAULTS = {
    "missed wait for gradients": Fault(changed(dist, "all_reduce", without_wait_for_floats), REDUCER, SUM),
    "missed wait for a gradient shard": Fault(
        changed(bucket_reducer, "reduce_scatter_single", without_wait), REDUCER, "work = reduce_scatter_single", SHARDED
    ),
    "missed wait for parameters": Fault(
        changed(bucket_reducer, "all_gather_single", without_wait), REDUCER, "work = all_gather_single", SHARDED
    ),
    "missed wait for dX": Fault(
        changed(dist, "all_reduce", without_wait_for_floats),
        "mpu/layers.py",
        "reduction_of_dx = dist.all_reduce(dx",
        TENSOR,
    ),
    "missed wait for a sequence": Fault(
        changed(mappings, "all_gather_single", without_wait),
        "mpu/mappings.py",
        "return gathered, all_gather_single",
        f"{TENSOR} --sequence-parallel",
    ),
    "missed wait for a stage": Fault(
        changed(dist, "batch_isend_irecv", without_wait), P2P, "works = dist.batch_isend_irecv", PIPELINE
    ),
    "missed wait for a send": Fault(
        changed(ForwardBackward, "_wait_for_sends", lambda original, self: self._sent.clear()),
        P2P,
        "works = dist.batch_isend_irecv",
        PIPELINE,
    ),
    "gradients overwritten": Fault(
        extra(BucketReducer, "_send", lambda _, self, index: self._buffer.bucket_grads(index).zero_(), after=True),
        HERE,
        "self._buffer.bucket_grads(index).zero_()",
    ),
    "sent tensor overwritten": Fault(
        extra(mpu, "batched_p2p_ops", lambda _, sends, *rest: [x.zero_() for x, _ in sends], after=True),
        HERE,
        "[x.zero_() for x, _ in sends]",
        PIPELINE,
    ),
    "other order": Fault(
        lambda patch: patch.setattr(bucket_reducer, "reversed", list, raising=False),
        REDUCER,
        "work = all_gather_single",
        SHARDED,
    ),
    "collective in a branch": Fault(
        extra(loop.IterationLogger, "log", lambda _: dist.all_reduce(torch.zeros(2))),
        HERE,
        "lambda _: dist.all_reduce(torch.zeros(2))",
    ),
    "collective in a save": Fault(
        extra(CheckpointManager, "_contents", lambda *_: gather_strings("saved")), HERE, 'gather_strings("saved")'
    ),
    "no collective in a load": Fault(
        changed(
            checkpointing, "find_checkpoint", lambda original, *args, gather, **options: original(*args, **options)
        ),
        "megatron/gpt2/checkpoint/save_folder.py",
        "tracked, names, *problems = json.loads(gather(",
    ),
    "no evaluation": Fault(
        changed(loop, "evaluate_and_log", lambda *_: None),
        "megatron/gpt2/train/evaluate.py",
        "nats_all, tokens_all, size_all =",
    ),
    "other shape": Fault(
        changed(
            data, "gather_ints", lambda _, number, device: gather_rows(torch.tensor([number, 0])).view(-1).tolist()
        ),
        GATHERING,
        "dist.all_gather(rows, sent)",
        TENSOR,
    ),
    "other dtype": Fault(
        changed(
            dist,
            "all_reduce",
            lambda original, x, **options: original(x.float() if x.is_floating_point() else x, **options),
        ),
        GATHERING,
        "dist.all_reduce(stacked, group=group)",
    ),
    "other operation": Fault(
        changed(dist, "all_reduce", lambda original, x, op=dist.ReduceOp.SUM, **options: original(x, **options)),
        SIGNALS,
        "self._pending = dist.all_reduce",
    ),
    "other root": Fault(
        changed(
            dist,
            "broadcast",
            lambda original, x, *args, group_src=None, **options: original(
                x, *args, **options, **({} if args else {"group_src": 0})
            ),
        ),
        P2P,
        "dist.broadcast(x, group=group, group_src=size - 1)",
        PIPELINE,
    ),
    "other group": Fault(
        extra(
            BucketReducer,
            "__init__",
            lambda _, self, *args, **options: setattr(self, "_group", mpu.get_tensor_model_parallel_group()),
            after=True,
        ),
        REDUCER,
        SUM,
        TENSOR,
        4,
    ),
    "groups in another order": Fault(
        changed(
            dist, "new_subgroups_by_enumeration", lambda original, ranks, **options: original(ranks[::-1], **options)
        ),
        "mpu/initialize.py",
        "return dist.new_subgroups_by_enumeration",
        TENSOR,
        4,
    ),
    "send without a receive": Fault(
        extra(*END, lambda _: mpu.send_forward(torch.zeros(3), ring=True)),
        HERE,
        "send_forward(torch.zeros(3), ring=True)",
        PIPELINE,
    ),
    "receive without a send": Fault(
        extra(*END, lambda _: mpu.recv_forward(torch.zeros(3), ring=True)),
        HERE,
        "recv_forward(torch.zeros(3), ring=True)",
        PIPELINE,
    ),
    "opposing sends": Fault(extra(*END, opposing_sends), HERE, "dist.send(torch.zeros(4), 1", ranks=(0, 1)),
    "two groups": Fault(
        extra(*END, interleaved), HERE, "works = [dist.all_reduce(torch.zeros(4)", TENSOR, 4, (0, 1, 2, 3)
    ),
}
IN_DEFAULT_RUN = ("missed wait for gradients", "collective in a save")


def test_the_lines_of_the_faults_exist():
    """Faults name lines of the program by their text. If a line changes, this test fails before the wide run does."""
    assert [name for name, fault in FAULTS.items() if not line_numbers(fault.file, fault.line)] == []


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, id=name, marks=[] if name in IN_DEFAULT_RUN else pytest.mark.wide)
        for name, fault in FAULTS.items()
    ],
)
def test_a_fault_is_found(fault: Fault):
    story = story_of(f"{fault.flags} --global-batch-size 4", fault.world_size, fault.plant, fault.ranks)
    lines = [f"{fault.file}:{number}" for number in line_numbers(fault.file, fault.line)]
    assert any(line in story for line in lines), story
