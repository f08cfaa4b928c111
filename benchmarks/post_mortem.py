#!/usr/bin/env python3
"""Real deaths of small runs, of twenty kinds, and whether tools/post_mortem.py names what each one died of.

    python benchmarks/post_mortem.py                  # 20 deaths: ten minutes on two cores; a call that is interrupted
                                                      # goes on
    python benchmarks/post_mortem.py --trials 40      # each kind twice, at other ranks and steps
    python benchmarks/post_mortem.py --kind cut       # this kind alone

A trial is good where the first cause is of the right kind, and its line names the right rank, signal, tensor or file.
The exit code is 1 where a trial is not good.
"""

from __future__ import annotations

import argparse
import functools
import os
import random
import re
import resource
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works in a clone that is not installed

import torch

from benchmarks import report
from benchmarks.trials import Trial, campaign, of_each
from data_utils import GPT2Dataset
from megatron.gpt2.dist.signals import ECHO
from megatron.gpt2.extensions.post_mortem import command as post_mortem
from megatron.gpt2.monitor.incidents import read_incidents
from megatron.gpt2.train.run import Run
from tests.faults import state_faults
from tests.faults.injector import FAULTS, inject
from tests.megatron.gpt2.dist.started_ranks import Rank

FLAGS = (
    "--num-layers",
    "2",
    "--hidden-size",
    "32",
    "--micro-batch-size",
    "1",
    "--global-batch-size",
    "4",
    "--nproc-per-node",
    "2",
    "--save-interval",
    "2",
    "--exit-interval",
    "12",
)
TENSOR, STAGES = ("--model-parallel-size", "2"), ("--pipeline-model-parallel-size", "2")
SHARDED, CHECKED = ("--use-distributed-optimizer",), ("--check-replicas-interval", "1")
SHORT = ("--distributed-timeout-minutes", "0.1")
UP = "transformer.layers.1.mlp.dense_h_to_4h.weight"
WHERE = "rank={rank}:step={step}"


class Death(NamedTuple):
    """faults: as of tests/faults/injector.py and OWN, with {rank}, {step} and {save}, the --save folder. kind and what:
    the first cause that is expected, and a pattern of its line. outside: what another process does to the run."""

    faults: tuple[str, ...]
    flags: tuple[str, ...]
    kind: str
    what: str
    outside: Callable[[Rank, Path], None] | None = None


def twice(rank: Rank, save: Path, number: signal.Signals = signal.SIGTERM) -> None:
    """A signal, and again when it counts as another one, once a rank does not come to the end of its step. A terminal
    sends SIGINT to the ranks as well."""
    end, log = time.monotonic() + 240, save / "metrics.jsonl"
    while not (log.exists() and log.read_text().count("\n") >= 2):
        assert time.monotonic() < end and rank.process.is_alive(), rank.end()[1]
        time.sleep(0.05)
    time.sleep(2.0)
    assert rank.process.pid is not None
    processes = [rank.process.pid]
    if number == signal.SIGINT:
        processes += {one["process"] for one in read_incidents(save)}
    for pause in (ECHO[number] + 1.0, 0.0):
        for process in processes:
            os.kill(process, number)
        time.sleep(pause)


def crash(run: Run) -> None:
    """As by a library's fault."""
    os.kill(os.getpid(), signal.SIGSEGV)


def bug(run: Run) -> None:
    """An error that the program does not expect."""
    raise KeyError("learning_rate")


def memory(run: Run) -> None:
    """The system gives this process no more memory, and it wants some."""
    resource.setrlimit(resource.RLIMIT_AS, (2**30, resource.getrlimit(resource.RLIMIT_AS)[1]))
    torch.ones(2**30)


def fill(run: Run) -> None:
    """The disk has room for records and none for weights."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def damage(run: Run, folder: str) -> None:
    """The token files of the run hold other bytes from now on."""
    paths = list(Path(folder).rglob("*.bin"))
    assert paths, f"no token file in {folder}"
    for path in paths:
        with open(path, "r+b") as file:
            file.write(b"\xff" * path.stat().st_size)


def no_answer(run: Run) -> None:
    """The file system of the data does not answer: a thread that reads a batch ahead never comes back."""
    mock.patch.object(GPT2Dataset, "rows", lambda *inputs: state_faults.hang(run)).start()


def power(run: Run) -> None:
    """All processes of the run end at once, its launcher first."""
    launcher = os.getppid()
    os.kill(launcher, signal.SIGSTOP)  # so that it notes nothing of what comes
    ranks = map(int, Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split())
    for process in (*(rank for rank in ranks if rank != os.getpid()), launcher, os.getpid()):
        os.kill(process, signal.SIGKILL)


OWN: dict[str, Callable[..., None]] = {
    "crash": crash,
    "bug": bug,
    "memory": memory,
    "fill": fill,
    "damage": damage,
    "no_answer": no_answer,
    "power": power,
}
SAID = r"rank {rank} \(\S+\)"
DEATHS: dict[str, Death] = {
    "kill": Death((f"kill:{WHERE}",), (), "killed rank", f"^{SAID} was ended by SIGKILL"),
    "kill inside a save": Death(
        (f"kill:{WHERE}:inside=save:event=2",), TENSOR, "killed rank", f"^{SAID} was ended by SIGKILL"
    ),
    "stop": Death((f"stop:{WHERE}",), SHORT, "hang", "^rank {rank} did not come to a collective"),
    "hang": Death(
        (f"hang:{WHERE}",),
        (*SHORT, *STAGES),
        "hang",
        r"^rank {rank} did not come to .* at megatron/gpt2/train/loop\.py:\d+",
    ),
    "hang in data loading": Death(
        (f"no_answer:{WHERE}",),
        SHORT,
        "hang in data loading",
        r"^rank {rank} did not come to .* at data_utils/\w+\.py:\d+",
    ),
    "NaN": Death(
        (f"nan:{WHERE}:name={UP}",),
        ("--max-skipped-steps", "2"),
        "not finite",
        f"first of all {SAID} had a gradient of {UP}",
    ),
    "infinite weight": Death(
        (f"break_weight:{WHERE}:name={UP}",),
        (*TENSOR, "--max-skipped-steps", "2"),
        "not finite",
        f"first of all {SAID} had a weight of {UP}",
    ),
    "flipped weight": Death(
        (f"flip:{WHERE}:name={UP}",), CHECKED, "replica drift", f"{SAID} holds another weight of {UP}"
    ),
    "flipped moment": Death(
        (f"flip:{WHERE}:kind=exp_avg",), (*CHECKED, *SHARDED), "replica drift", f"{SAID} holds another exp_avg of "
    ),
    "full disk": Death((f"fill:{WHERE}",), TENSOR, "full disk", "cannot write|not saved|File too large"),
    "damaged data": Death(
        (f"damage:{WHERE}:folder={{save}}/cache",),
        ("--data-cache-path", "{save}/cache"),
        "damaged data",
        "holds the token id 65535",
    ),
    "SIGTERM twice": Death(
        (f"slow:{WHERE}:seconds=100",), (), "SIGTERM", "ended by SIGTERM before they could save", twice
    ),
    "crash loop": Death(
        (f"kill:{WHERE}:attempt=any",),
        ("--max-restarts", "5"),
        "crash loop: killed rank",
        f"^{SAID} was ended by SIGKILL",
    ),
    "hang after a restart": Death(
        (f"kill:{WHERE}", "hang:rank={rank}:step=5:attempt=1"),
        (*SHORT, "--max-restarts", "1"),
        "hang",
        "^rank {rank} did not come to",
    ),
    "cut": Death(
        (f"cut:{WHERE}",), (), "lost link", "^ranks 0 and {rank} lost each other|^rank {rank} lost the others"
    ),
    "bug": Death((f"bug:{WHERE}",), (), "an error of the program", f"^{SAID}.*KeyError: 'learning_rate'"),
    "out of memory": Death((f"memory:{WHERE}",), (), "out of memory", f"^{SAID}.*memory"),
    "crash": Death((f"crash:{WHERE}",), (), "crashed rank", f"^{SAID} was ended by SIGSEGV"),
    "Ctrl-C twice": Death(
        (f"slow:{WHERE}:seconds=100",),
        (),
        "Ctrl-C",
        "a person pressed Ctrl-C twice",
        functools.partial(twice, number=signal.SIGINT),
    ),
    "no power": Death((f"power:{WHERE}",), (), "without a word", "^no process has noted how it ended"),
}


def plant(faults: Sequence[str]) -> None:
    """In the process of the launcher, before its ranks."""
    FAULTS.update(OWN)
    inject(faults)


def die(kind: str, folder: Path, seed: int) -> Trial:
    """A run that dies, and what post_mortem says of it."""
    chance, death = random.Random(seed), DEATHS[kind]
    save = folder / f"death_{seed}"
    facts = {"rank": chance.randrange(2), "step": chance.choice((2, 4)), "save": save}
    faults = [fault.format(**facts) for fault in death.faults]
    rank = Rank(
        folder,
        [*FLAGS, *(flag.format(**facts) for flag in death.flags), "--save", str(save)],
        {},
        before=functools.partial(plant, faults),
    )
    if death.outside:
        death.outside(rank, save)
    code, output = rank.end()
    found, lines = post_mortem.report(save)
    good = not found.well and found.kind == death.kind and bool(re.search(death.what.format(**facts), found.what))
    wrong: dict[str, Any] = (
        {} if good else {"expected": [death.kind, death.what.format(**facts)], "lines": lines, "output": output[-800:]}
    )
    return {
        "kind": kind,
        "faults": [fault.replace(str(folder), "…") for fault in faults],
        "exit_code": code,
        "found": found.kind,
        "what": found.what,
        **wrong,
        "good": good,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=len(DEATHS), help=f"how many (default: {len(DEATHS)})")
    parser.add_argument("--kind", choices=tuple(DEATHS), help="of this kind alone (default: of each in turn)")
    parser.add_argument("--smoke", action="store_true", help="two trials: proves the script")
    parser.add_argument("--output", metavar="DIR", type=Path, default=report.RESULTS)
    chosen = parser.parse_args(argv)
    kinds = list(DEATHS)
    seeds = [
        seed for seed in range(2 if chosen.smoke else chosen.trials) if chosen.kind in (None, kinds[seed % len(kinds)])
    ]
    good = campaign(
        "post mortem",
        chosen.output / "post_mortem.json",
        [[seed] for seed in seeds],
        of_each(lambda folder, seed: die(kinds[seed % len(kinds)], folder, seed)),
    )
    return int(not good)


if __name__ == "__main__":
    raise SystemExit(main())
