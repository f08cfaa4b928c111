"""The first cause of a death, out of what the processes of a run have noted; deaths of all kinds, written by hand."""

from __future__ import annotations

import re
from typing import Any

import pytest

from megatron.gpt2.extensions.post_mortem.deaths import cause_of, last_attempt

HOSTS = {0: "node001", 1: "node001", 2: "node002", 3: "node002"}
Line = dict[str, Any]


def of_rank(rank: int, when: float, kind: str, text: str = "", /, **details: Any) -> Line:
    return {
        "time": 1000.0 + when,
        "who": f"rank_{rank:05d}",
        "host": HOSTS[rank],
        "attempt": 0,
        "iteration": 634,
        "kind": kind,
        "text": text,
        **details,
    }


def of_launcher(host: str, when: float, kind: str, text: str = "", /, **details: Any) -> Line:
    return of_rank(0, when, kind, text, iteration=-1, **details) | {"who": f"launcher_{host}", "host": host}


def ended(when: float, rank: int, how: str | int, first: bool = True) -> Line:
    """What a launcher notes. how: a signal or an exit code."""
    key = "signal" if isinstance(how, str) else "exit_code"
    return of_launcher(HOSTS[rank], when, "rank ended", rank=rank, first=first, **{key: how})


def lost(rank: int, when: float, ranks: list[int], seconds: float | None = None) -> Line:
    return of_rank(rank, when, "lost", ranks=ranks, silences={str(other): seconds for other in ranks})


def started(attempt: int = 0, at: float = 0.0) -> list[Line]:
    return [
        of_rank(rank, at, "start", iteration=600, command=["python", "pretrain_gpt2.py"]) | {"attempt": attempt}
        for rank in HOSTS
    ]


CLOSED = "Connection closed by peer [10.0.0.3]:41052"
STACK_OF_DATA = ["megatron/gpt2/train/data.py:88 (next)", "data_utils/samplers.py:150 (batch)", "/x/np.py:3 (f)"]
STACK_OF_STEP = ["megatron/gpt2/train/train_step.py:30 (train_step)"]

# name: (what was noted after the start, kind, what the first line must say)
DEATHS: dict[str, tuple[list[Line], str, str]] = {
    "a killed rank": (
        [
            of_rank(0, 9.9, "error", f"RuntimeError: {CLOSED}", cause="another rank"),
            ended(10, 3, "SIGKILL"),
            lost(0, 13, [3], 3.2),
            ended(14, 0, 1),
        ],
        "killed rank",
        r"^rank 3 \(node002\) was ended by SIGKILL at iteration 634",
    ),
    "a killed rank, as the launcher tells it that has ended all others": (
        [
            ended(10, 0, "SIGKILL", first=False),
            ended(10, 1, "SIGKILL"),
        ],
        "killed rank",
        r"^rank 1 \(node001\) was ended by SIGKILL",
    ),
    "a crash in a library": (
        [ended(10, 0, "SIGSEGV"), lost(2, 13, [0])],
        "crashed rank",
        "rank 0 .node001. was ended by SIGSEGV",
    ),
    "a killed node": (
        [
            lost(0, 12, [2, 3], 4.0),
            lost(1, 12, [2, 3], 4.0),
            ended(14, 0, 1),
        ],
        "lost node",
        r"^ranks 2-3 on node002 fell silent",
    ),
    "a node whose ranks are all killed, and whose launcher lives": (
        [
            ended(10, 2, "SIGKILL", first=False),
            ended(10, 3, "SIGKILL"),
            lost(0, 14, [2, 3], 4.0),
            ended(15, 0, 1),
        ],
        "killed node",
        r"^ranks 2-3, all of node002, were ended by SIGKILL at once at iteration 634$",
    ),
    "a killed rank, and one beside it that its launcher had to kill": (
        [
            lost(0, 14, [3], 4.0),
            ended(22, 2, "SIGKILL", first=False),
            ended(22, 3, "SIGKILL"),
        ],
        "killed rank",
        r"^rank 3 \(node002\) was ended by SIGKILL",
    ),
    "a stopped rank": (
        [
            lost(0, 31, [3], 31.0),
            lost(2, 31, [3]),
            ended(40, 2, 1),
        ],
        "silent rank",
        r"^rank 3 gave no sign of life for 31 s at iteration 634",
    ),
    "a stopped rank that the launcher ends at last": (
        [
            of_rank(0, 30, "hang", "waits in all_reduce (mpu/grads.py:3)", stack=STACK_OF_STEP),
            of_rank(0, 31, "hang", "rank 3 (node002) has not come", ranks=[3], found_by=0),
            ended(40, 3, "SIGKILL"),
        ],
        "hang",
        "^rank 3 did not come to a collective",
    ),
    "a hang in data loading": (
        [
            of_rank(0, 30, "hang", "waits in broadcast (mpu/data.py:3)", stack=STACK_OF_STEP),
            of_rank(2, 30.1, "hang", "is at data_utils/samplers.py:150 (batch)", stack=STACK_OF_DATA),
            of_rank(0, 30.2, "hang", "ranks 0, 1 and 3 wait for rank 2", ranks=[2], found_by=0),
            of_rank(0, 33, "error", "RuntimeError: Timed out waiting 30000ms for recv", cause="another rank"),
            ended(34, 0, 1),
        ],
        "hang in data loading",
        r"^rank 2 did not come .* at data_utils/samplers.py:150",
    ),
    "a hang in a collective": (
        [
            of_rank(0, 30, "hang", "is at megatron/gpt2/train/train_step.py:30", stack=STACK_OF_STEP),
            of_rank(1, 30, "hang", "waits in all_reduce", stack=[]),
            of_rank(1, 31, "hang", "ranks 1 and 3 wait for ranks 0 and 2", ranks=[0, 2], found_by=1),
        ],
        "hang",
        r"^ranks 0 and 2 did not come .* at megatron/gpt2/train/train_step.py:30",
    ),
    "a hang that NCCL's watchdog ends": (
        [
            of_rank(1, 30, "hang", "rank 1 waits for rank 0", ranks=[0], found_by=1),
            ended(31, 1, "SIGABRT"),
        ],
        "hang",
        "^rank 0 did not come",
    ),
    "NaN in the gradients": (
        [
            of_rank(0, 9, "not finite", "first of all rank 1 had a gradient that was not", iteration=640),
            of_rank(0, 10, "error", "FloatingPointError: 10 steps in a row", iteration=640, cause="not finite"),
            ended(11, 0, 1),
        ],
        "not finite",
        r"^rank 0 \(node001\), iteration 640: FloatingPointError: 10 steps",
    ),
    "one skipped step, then a killed rank": (
        [
            of_rank(0, 2, "not finite", "the step is skipped", iteration=610),
            ended(10, 1, "SIGKILL"),
        ],
        "killed rank",
        "rank 1",
    ),
    "out of memory": (
        [
            of_rank(2, 5, "error", "out of memory on rank 2: expected 9,000 MB in backward", cause="out of memory"),
            lost(0, 8, [2]),
            ended(9, 2, 2),
        ],
        "out of memory",
        "^rank 2 .node002., iteration 634: out of memory on rank 2",
    ),
    "a bug": (
        [
            of_rank(3, 5, "error", "KeyError: 'learning_rate'", at="megatron/gpt2/train/loop.py:31"),
            of_rank(0, 5.1, "error", f"RuntimeError: {CLOSED}", cause="another rank"),
            lost(0, 8, [3]),
        ],
        "an error of the program",
        r"^rank 3 .*KeyError: 'learning_rate', at megatron/gpt2/train/loop.py:31$",
    ),
    "a bug that was noted late": (
        [
            of_rank(0, 4, "error", f"RuntimeError: {CLOSED}", cause="another rank"),
            of_rank(3, 5, "error", "ZeroDivisionError: by zero"),
        ],
        "an error of the program",
        "^rank 3 .*ZeroDivisionError",
    ),
    "a start that was refused": (
        [of_rank(0, 1, "refused", "--train-data x.txt: no such file", exit_code=2)],
        "bad input",
        r"^rank 0 .*: --train-data x\.txt: no such file$",
    ),
    "a killed node, and a restart without it": (
        [
            lost(0, 12, [2, 3], 4.0),
            {**of_rank(0, 140, "refused", "ranks 2-3 of 4 did not come within 120 s", exit_code=2), "attempt": 1},
        ],
        "lost node",
        r"^ranks 2-3 on node002 fell silent",
    ),
    "a start that was refused beside the run": (
        [
            of_rank(0, 1, "refused", "--save run: process 7 saves there", exit_code=2),
            ended(10, 1, "SIGKILL"),
        ],
        "killed rank",
        "rank 1",
    ),
    "a lost link": (
        [
            lost(0, 30, [2, 3], 30.0),
            lost(1, 30, [2, 3], 30.0),
            lost(2, 30, [0, 1], 30.0),
            lost(3, 30, [0, 1], 30.0),
        ],
        "lost link",
        "^ranks 0-3 lost each other",
    ),
    "a rank that is cut off from the others and the store": (
        [
            lost(1, 30, [0], 4.0),
            lost(0, 30, [0], 4.0),
        ],
        "lost link",
        "^rank 0 lost the others at iteration 634",
    ),
    "a job that the scheduler kills": (
        [ended(10 + rank / 10, rank, "SIGKILL") for rank in HOSTS],
        "killed job",
        "^4 ranks were ended by SIGKILL at once",
    ),
    "SIGTERM before the first step": (
        [ended(3, 0, "SIGTERM")],
        "SIGTERM",
        "^rank 0 .* was ended by SIGTERM with exit code 143",
    ),
    "Ctrl-C twice": (
        [ended(3, 0, "SIGINT")],
        "Ctrl-C",
        "^rank 0 .* was ended by SIGINT",
    ),
    "a crash loop": (
        [
            ended(10, 1, "SIGSEGV"),
            of_launcher("node001", 11, "crash loop", "the same step, 635, failed three times"),
        ],
        "crash loop: crashed rank",
        "rank 1 .node001. was ended by SIGSEGV",
    ),
    # What the error itself says counts.
    **{
        cause: ([of_rank(1, 9, kind, f"an error: {cause}", cause=cause)], cause, f"^rank 1 .*: an error: {cause}$")
        for kind, causes in (
            ("error", ("full disk", "replica drift", "damaged checkpoint", "damaged data", "bad input")),
            ("refused", ("missing ranks",)),
        )
        for cause in causes
    },
    "no power": ([], "without a word", "last word is of rank 3"),
    "an exit code and nothing else": (
        [ended(3, 2, 7)],
        "exit code 7",
        "^rank 2 .* ended with exit code 7",
    ),
}


@pytest.mark.parametrize("name", DEATHS)
def test_the_first_cause_is_named(name: str) -> None:
    noted, kind, said = DEATHS[name]
    death = cause_of([*started(), *noted], None)
    assert death.kind == kind and re.search(said, death.what), death
    assert not death.well and all(text and "\n" not in text and len(text) < 400 for text in death)


def test_there_are_twenty_kinds() -> None:
    assert len({kind for _, kind, _ in DEATHS.values()}) >= 20


def test_what_ended_json_says_counts_first() -> None:
    noted = [*started(), of_rank(0, 9, "end", "SIGTERM", exit_code=0)]
    death = cause_of(noted, {"reason": "SIGTERM", "iteration": 640, "exit_code": 0, "time": 1009.0})
    assert death.well and death.what == "nothing: SIGTERM, at iteration 640"
    assert cause_of(noted, {"exit_code": 1}).kind == "exit code 1"
    assert cause_of([], None).kind == "without a word"


def test_earlier_attempts_and_starts_are_left_out() -> None:
    """What the last start died of counts, however the folder's earlier runs died."""
    killed = ended(10, 1, "SIGKILL")
    again = [*started(attempt=1, at=20), of_rank(2, 30, "error", "KeyError: 'x'") | {"attempt": 1}]
    restart = of_launcher("node001", 15, "restart")
    assert cause_of([*started(), killed, restart, *again], None).kind == "an error of the program"
    refused = of_rank(0, 40, "refused", "--lr -1", exit_code=2)
    assert last_attempt([*started(), killed, restart, *again, refused]) == [refused]
    by_hand = [*started(at=5000), of_rank(2, 5030, "error", "KeyError: 'x'")]
    assert last_attempt([*started(), killed, *by_hand]) == by_hand
    # A rank that the elastic run goes on without never starts again.
    fewer = [line for line in again if line["who"] != "rank_00003"]
    assert last_attempt([*started(), killed, restart, *fewer]) == fewer
