#!/usr/bin/env python3
"""Faults that a run has to notice by itself, at random ranks, steps and places, and what noticing costs.

    python benchmarks/state_faults.py           # all parts: an hour on two cores; a call that is interrupted goes on
    python benchmarks/state_faults.py hangs     # 20 runs, a rank of which is stopped, or hangs and lives
    python benchmarks/state_faults.py nan       # 20 NaNs in a gradient of one rank
    python benchmarks/state_faults.py flips     # 60 flipped bits in weights, masters and moments
    python benchmarks/state_faults.py cost      # the time of a step of 124M with everything on, over one without
    python benchmarks/state_faults.py flips --trials 10 --output DIR

hangs: the seconds are counted from the moment at which the first of the other ranks began the step in which it waits,
which is a little before it waits, to the moment at which the line that names the rank was written. A trial is good
where the line names this rank, and of one that lives the line of the program; where the seconds are below the timeout
and 3 more; and where no rank is left.
nan: good where every rank skips this step and no other, all ranks have the same losses, loss scales and learning rates
before and after it, the loss scale of fp16 is halved once, and weights and optimizer state are finite.
flips: good where every rank says the same line, which names rank, kind and tensor; where two replicas differ and
neither has seen it change, both ranks. A bit that flips between two hashed updates is found by the rank itself. One
that flips inside of the update, or after one that is not hashed, is found by the replicas.
The exit code is 1 where a trial is not good, or where everything together costs more than 2 % of a step.
"""

from __future__ import annotations

import argparse
import functools
import random
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works in a clone that is not installed

import torch
from torch import Tensor

from benchmarks import report
from benchmarks.trials import Trial, campaign, of_each
from benchmarks.watch_cost import cost, one_step
from megatron.gpt2.extensions.watch.replicas import StateChanged
from megatron.gpt2.monitor.incidents import rank_name, read_incidents
from megatron.gpt2.train import loop, train_step
from megatron.gpt2.train.run import Run
from tests.distributed import run_ranks
from tests.faults import state_faults
from tests.faults.injector import inject
from tests.megatron.gpt2.dist.started_ranks import Rank
from tests.megatron.gpt2.train.training_runs import finish, start, state, steps

TIMEOUT, LATE = 6.0, 3.0  # seconds: of a collective, and after it until the rank is named
TENSOR, STAGES = ("--model-parallel-size", "2"), ("--pipeline-model-parallel-size", "2")
SHARDED = ("--use-distributed-optimizer",)
TINY = ("--num-layers", "2", "--hidden-size", "32", "--micro-batch-size", "1", "--global-batch-size", "6")

# Where a rank hangs, alive: the line of the program that it never leaves.
PLACES: dict[str, tuple[ModuleType, str]] = {
    "step": (loop, "train_step(run)"),
    "data": (train_step, "run.data.to_device("),
    "optimizer": (train_step, "optimizer.step()"),
}
# Name, ranks, flags.
HANGS = (
    ("2 replicas", 2, ()),
    ("3 replicas", 3, ()),
    ("2 tensor-parallel", 2, TENSOR),
    ("2 stages", 2, STAGES),
    ("2 sharded", 2, SHARDED),
)
NANS = (("2 replicas", 2, ()), ("2 sharded", 2, SHARDED), ("2 tensor-parallel", 2, TENSOR), ("2 stages", 2, STAGES))
# Name, ranks, flags, and how a bit may flip.
FLIPS: tuple[tuple[str, int, tuple[str, ...], tuple[str, ...]], ...] = (
    ("3 replicas", 3, (), ("between", "window", "interval")),
    ("2 replicas", 2, (), ("between", "window", "interval")),
    ("2 tensor-parallel", 2, TENSOR, ("between", "window")),
    ("2 sharded", 2, SHARDED, ("between", "window")),
    ("2 stages", 2, STAGES, ("between",)),
)
PRECISIONS = ("fp32", "bf16")


def watched(place: str, rank: int, step: int) -> None:
    """In the process of the launcher, before its ranks: one of them does not come, and each notes when it began a step."""
    inject([f"{'stop' if place == 'stop' else 'hang'}:rank={rank}:step={step}"] * (place in ("stop", "step")))
    do_step = vars(loop)["train_step"]  # the injector's, where there is one

    def noted(run: Run) -> None:
        run.incidents.note("step")
        if run.parallel.rank == rank and run.progress.iteration == step and place in ("data", "optimizer"):
            owner, method = (run.data, "to_device") if place == "data" else (run.engine.optimizer, "step")
            mock.patch.object(owner, method, lambda *inputs: state_faults.hang(run)).start()
        do_step(run)

    mock.patch.object(loop, "train_step", noted).start()


def line_of(place: str) -> str:
    """ "megatron/gpt2/train/loop.py:31"."""
    module, text = PLACES[place]
    path = Path(str(module.__file__))
    lines = path.read_text().splitlines()
    return f"{path.relative_to(report.ROOT)}:{next(n for n, line in enumerate(lines, 1) if text in line)}"


def lives(process: int) -> bool:
    """Whether a process is there and not only waited for."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def hang(folder: Path, seed: int) -> Trial:
    """A rank of a real run is stopped, or hangs and lives."""
    chance = random.Random(seed)
    name, world, flags = HANGS[seed % len(HANGS)]
    place = chance.choice(("stop", "stop", *PLACES))
    bad, step, save = chance.randrange(world), chance.randint(1, 4), folder / f"hang_{seed}"
    rank = Rank(
        folder,
        [
            *TINY,
            *flags,
            "--nproc-per-node",
            str(world),
            "--distributed-timeout-minutes",
            str(TIMEOUT / 60),
            "--exit-interval",
            "9",
            "--log-interval",
            "100",
            "--save",
            str(save),
        ],
        {},
        before=functools.partial(watched, place, bad, step),
    )
    code, output = rank.end()
    noted = read_incidents(save)
    began = {one["who"]: one["time"] for one in noted if one["kind"] == "step"}
    waits_since = min(began[rank_name(other)] for other in range(world) if other != bad)
    line = next((one for one in noted if one["kind"] == "hang" and "ranks" in one), None)
    said, where = line["text"] if line else output[-400:], "" if place == "stop" else line_of(place)
    seconds = line["time"] - waits_since if line else None
    left = [one["who"] for one in noted if one["kind"] == "start" and lives(one["process"])]
    names_it = (
        line is not None
        and line["ranks"] == [bad]
        and (
            f"rank {bad} is at {where} (" in said
            if where
            else bool(re.match(rf"rank {bad} \(\S+\) gave no sign", said))
        )
    )
    return {
        "layout": name,
        "fault": f"{place}:rank={bad}:step={step}",
        "exit_code": code,
        "line": said,
        "seconds": seconds and round(seconds, 2),
        "left": left,
        "good": names_it and code == 1 and not left and seconds is not None and seconds < TIMEOUT + LATE,
    }


def with_a_nan(rank: int, world: int, folder: str, flags: Sequence[str], seeds: Sequence[int]) -> list[Trial]:
    """On each rank, of each seed: what it saw in some steps, one of which has a NaN on one rank."""
    trials = []
    for seed in seeds:
        chance = random.Random(seed)
        bad, at, share = chance.randrange(world), chance.randint(1, 4), chance.random()
        precision = ("fp16", "bf16")[seed // len(NANS) % 2]
        scale = ("--initial-loss-scale", "1024", "--hysteresis", "1") * (precision == "fp16")
        run = start(
            rank, world, folder, [*TINY, *flags, "--precision", precision, *scale, "--save", f"{folder}/nan_{seed}"]
        )
        seen, name = steps(run, at), ""
        if rank == bad:
            parameters = {name: one for name, one in run.engine.model.named_parameters() if "embeddings" not in name}
            name = list(parameters)[int(share * len(parameters))]
            once = [share]

            def poison(gradient: Tensor, once: list[float] = once) -> Tensor:
                if once:  # in the first micro-batch of the step
                    gradient = gradient.clone()
                    gradient.view(-1)[int(once.pop() * gradient.numel())] = float("nan")
                return gradient

            handle = parameters[name].register_hook(poison)  # type: ignore[no-untyped-call]
            poisoned = steps(run, 1)
            handle.remove()
            assert not once, f"{name} has no gradient"
        else:
            poisoned = steps(run, 1)
        later = steps(run, 4)
        finite = all(bool(torch.isfinite(tensor).all()) for tensor in state(run).values())
        trials.append(
            {
                "seed": seed,
                "precision": precision,
                "fault": f"nan:rank={bad}:step={at}",
                "tensor": name,
                "finite": finite,
                "skips": [number == at for number in range(at + 5)],
                "seen": {key: seen[key] + poisoned[key] + later[key] for key in ("loss", "scale", "skipped", "rate")},
            }
        )
        finish(run)
    return trials


def nans(folder: Path, seeds: Sequence[int]) -> list[Trial]:
    """All of one layout, in one spawn."""
    name, world, flags = NANS[seeds[0] % len(NANS)]
    trials = []
    for of_ranks in zip(*run_ranks(with_a_nan, world, str(folder), flags, seeds, timeout=900), strict=True):
        first = of_ranks[0]
        agree = all(one["seen"] == first["seen"] for one in of_ranks)
        finite = all(one["finite"] for one in of_ranks) and bool(torch.tensor(first["seen"]["loss"]).isfinite().all())
        trials.append(
            {
                "seed": first["seed"],
                "layout": name,
                "precision": first["precision"],
                "fault": first["fault"],
                "tensor": "".join(one["tensor"] for one in of_ranks),
                "ranks_agree": agree,
                "finite": finite,
                "scales": (scales := first["seen"]["scale"]),
                "good": agree
                and finite
                and first["seen"]["skipped"] == first["skips"]
                and scales[-1] == scales[0] / (2 if first["precision"] == "fp16" else 1),
            }
        )
    return trials


def flipped(
    rank: int, world: int, folder: str, flags: Sequence[str], ways: Sequence[str], precision: str, seeds: Sequence[int]
) -> list[Trial]:
    """On each rank, of each seed: which bit flipped there, and the line that the run said, with its iteration."""
    trials = []
    for seed in seeds:
        chance = random.Random(seed)
        way = ways[(seed // (len(FLIPS) * len(PRECISIONS))) % len(ways)] if len(ways) > 1 else ways[0]
        bad, shares, bit = chance.randrange(world), [chance.random() for _ in range(3)], chance.randrange(32)
        after = chance.choice((1, 2, 4, 5)) if way == "interval" else chance.randint(1, 4)
        run = start(
            rank,
            world,
            folder,
            [
                *TINY,
                *flags,
                "--precision",
                precision,
                "--check-replicas-interval",
                "3" if way == "interval" else "1",
                "--save",
                f"{folder}/flip_{seed}",
            ],
        )
        fault, line = {}, ""
        if rank == bad:
            fault = place_of_flip(run, way, shares, precision) | {"bit": bit}
        # The method after which it happens: before the forward, when the gradients are there, or inside the update.
        owner, method = {"window": (run.engine.optimizer, "step")}.get(way) or (
            (run.data, "to_device"),
            (run.engine.reducer, "finish"),
        )[chance.randrange(2)]
        do, waiting = getattr(owner, method), [fault] if rank == bad else []

        def then(*inputs: Any, run: Run = run, do: Any = do, waiting: Any = waiting, after: int = after) -> Any:
            result = do(*inputs)
            if run.progress.iteration == after and waiting:
                state_faults.flip(run, **waiting.pop())
            return result

        try:
            with mock.patch.object(owner, method, then):
                for _ in range(8):
                    one_step(run)
        except StateChanged as error:
            line = str(error)
        trials.append(
            {
                "seed": seed,
                "way": way,
                "moment": method,
                "rank": bad,
                "after": after,
                **fault,
                "found_after": run.progress.iteration,
                "line": line.partition(": the memory")[0],
            }
        )
        finish(run)
    return trials


def place_of_flip(run: Run, way: str, shares: Sequence[float], precision: str) -> dict[str, Any]:
    """A random kind, tensor and element of this rank; of `window` and `interval` one of which there are replicas, and
    of `interval` one that remains what it became, as the updates add to it."""
    optimizer, parameters = run.engine.optimizer, run.engine.flat.parameters
    kinds = ["weight", *["master"] * (precision == "bf16"), *optimizer.moments]
    if way == "interval":
        kinds = ["master" if precision == "bf16" else "weight"]
    elif way == "window" and optimizer.flat.is_sharded:
        kinds = ["weight"]
    kind = kinds[int(shares[0] * len(kinds))]
    sizes = (
        {name: one.numel() for name, one in parameters.items()}
        if kind == "weight"
        else {one.name: one.values.numel() for one in optimizer.tensors() if one.kind == kind}
    )
    tensors = [
        name
        for name, size in sizes.items()
        if size
        and not (
            way == "window"
            and run.parallel.tensor_model_parallel_size > 1
            and getattr(parameters[name], "model_parallel", False)
        )
    ]
    name = tensors[int(shares[1] * len(tensors))]
    return {"kind": kind, "name": name, "element": int(shares[2] * sizes[name])}


def flips(folder: Path, seeds: Sequence[int]) -> list[Trial]:
    """All of one layout and precision, in one spawn."""
    name, world, flags, ways = FLIPS[seeds[0] % len(FLIPS)]
    precision = PRECISIONS[seeds[0] // len(FLIPS) % len(PRECISIONS)]
    trials = []
    for of_ranks in zip(
        *run_ranks(flipped, world, str(folder), flags, ways, precision, seeds, timeout=900), strict=True
    ):
        one = of_ranks[of_ranks[0]["rank"]]
        after, what = one["after"], f"another {one['kind']} of {re.escape(one['name'])}"
        expected, found_after = rf"rank {one['rank']} holds {what} than the update of iteration {after} left", after
        if one["way"] != "between":
            who = f"rank {one['rank']} holds" if world > 2 else "ranks 0-1 hold"
            of_whom = "the other replicas" if world > 2 else "each other"
            found_after = after + 1
            if one["way"] == "interval":  # a weight follows its master, which is of the same tensor
                what, found_after = rf"another \w+ of {re.escape(one['name'])}( and 1 other)?", -(-after // 3) * 3
            expected = rf"{who} {what} than {of_whom}, since iteration \d+"
        agree = all((other["line"], other["found_after"]) == (one["line"], one["found_after"]) for other in of_ranks)
        trials.append(
            {
                **one,
                "layout": name,
                "precision": precision,
                "ranks_agree": agree,
                "good": agree and one["found_after"] == found_after and bool(re.match(expected, one["line"])),
            }
        )
    return trials


# Of each part its chunks, how many of them share the seeds (None: one seed each), and the trials in all.
PARTS: dict[str, tuple[Callable[[Path, Sequence[int]], list[Trial]], int | None, int]] = {
    "hangs": (of_each(hang), None, 20),
    "nan": (nans, len(NANS), 20),
    "flips": (flips, len(FLIPS) * len(PRECISIONS), 60),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, help="how many, and pairs of steps of `cost` (default: all; 40)")
    parser.add_argument("--smoke", action="store_true", help="one trial of each, and a tiny model: proves the script")
    parser.add_argument("--output", metavar="DIR", type=Path, default=report.RESULTS)
    parser.add_argument("part", nargs="?", choices=(*PARTS, "cost"), help="default: all")
    chosen, good = parser.parse_args(argv), []
    for part in [chosen.part] if chosen.part else [*PARTS, "cost"]:
        path = chosen.output / f"state_{part}.json"
        if part == "cost":
            good.append(cost(path, chosen.smoke, 1 if chosen.smoke else chosen.trials or 40))
            continue
        do, groups, most = PARTS[part]
        trials = 1 if chosen.smoke else chosen.trials or most
        chunks = [range(first, trials, groups or trials) for first in range(min(groups or trials, trials))]
        good.append(campaign(f"state faults: {part}", path, chunks, do))
    return int(not all(good))


if __name__ == "__main__":
    raise SystemExit(main())
