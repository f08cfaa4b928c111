"""The first cause of a death, out of what the processes of a run have noted; deaths of all kinds, written by hand."""

from __future__ import annotations

import re
from typing import Any

import pytest

from megatron.gpt2.extensions.post_mortem.deaths import cause_of, last_attempt

HOSTS = {0: "node001", 1: "node001", 2: "node002", 3: "node002"}
Line = dict[str, Any]


def of_rank(rank: int, when: float, kind: str, text: str = "", iteration: int = 634, **details: Any) -> Line:
    return {
        "time": 1000.0 + when,
        "who": f"rank_{rank:05d}",
        "host": HOSTS[rank],
        "attempt": 0,
        "iteration": iteration,
        "kind": kind,
        "text": text,
        **details,
    }


def of_launcher(host: str, at: float, kind: str, text: str = "", **details: Any) -> Line:
    return {
        "time": 1000.0 + at,
        "who": f"launcher_{host}",
        "host": host,
        "attempt": 0,
        "iteration": -1,
        "kind": kind,
        "text": text,
        **details,
    }


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
            of_launcher("node002", 10, "rank ended", "rank 3 was ended by SIGKILL", rank=3, signal="SIGKILL"),
            of_rank(0, 13, "lost", "rank 3 (node002) was lost", ranks=[3], silences={"3": 3.2}),
            of_launcher("node001", 14, "rank ended", rank=0, exit_code=1),
        ],
        "killed rank",
        r"^rank 3 \(node002\) was ended by SIGKILL at iteration 634",
    ),
    "a killed rank, as the launcher tells it that has ended all others": (
        [
            of_launcher("node001", 10, "rank ended", rank=0, first=False, signal="SIGKILL"),
            of_launcher("node001", 10, "rank ended", rank=1, first=True, signal="SIGKILL"),
        ],
        "killed rank",
        r"^rank 1 \(node001\) was ended by SIGKILL",
    ),
    "a crash in a library": (
        [of_launcher("node001", 10, "rank ended", rank=0, signal="SIGSEGV"), of_rank(2, 13, "lost", ranks=[0])],
        "crashed rank",
        "rank 0 .node001. was ended by SIGSEGV",
    ),
    "a killed node": (
        [
            of_rank(0, 12, "lost", ranks=[2, 3], silences={"2": 4.0, "3": 4.1}),
            of_rank(1, 12, "lost", ranks=[2, 3], silences={"2": 4.0, "3": 4.1}),
            of_launcher("node001", 14, "rank ended", rank=0, exit_code=1),
        ],
        "lost node",
        r"^ranks 2-3 on node002 fell silent",
    ),
    "a node whose ranks are all killed, and whose launcher lives": (
        [
            of_launcher("node002", 10, "rank ended", rank=2, first=False, signal="SIGKILL"),
            of_launcher("node002", 10, "rank ended", rank=3, first=True, signal="SIGKILL"),
            of_rank(0, 14, "lost", ranks=[2, 3], silences={"2": 4.0, "3": 4.1}),
            of_launcher("node001", 15, "rank ended", rank=0, first=True, exit_code=1),
        ],
        "killed node",
        r"^ranks 2-3, all of node002, were ended by SIGKILL at once at iteration 634$",
    ),
    "a killed rank, and one beside it that its launcher had to kill": (
        [
            of_rank(0, 14, "lost", ranks=[3], silences={"3": 4.0}),
            of_launcher("node002", 22, "rank ended", rank=2, first=False, signal="SIGKILL"),
            of_launcher("node002", 22, "rank ended", rank=3, first=True, signal="SIGKILL"),
        ],
        "killed rank",
        r"^rank 3 \(node002\) was ended by SIGKILL",
    ),
    "a stopped rank": (
        [
            of_rank(0, 31, "lost", ranks=[3], silences={"3": 31.0}),
            of_rank(2, 31, "lost", ranks=[3]),
            of_launcher("node002", 40, "rank ended", rank=2, exit_code=1),
        ],
        "silent rank",
        r"^rank 3 gave no sign of life for 31 s at iteration 634",
    ),
    "a stopped rank that the launcher ends at last": (
        [
            of_rank(0, 30, "hang", "waits in all_reduce (mpu/grads.py:3)", stack=STACK_OF_STEP),
            of_rank(0, 31, "hang", "rank 3 (node002) has not come", ranks=[3], found_by=0),
            of_launcher("node002", 40, "rank ended", rank=3, first=True, signal="SIGKILL"),
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
            of_launcher("node001", 34, "rank ended", rank=0, exit_code=1),
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
            of_launcher("node001", 31, "rank ended", rank=1, signal="SIGABRT"),
        ],
        "hang",
        "^rank 0 did not come",
    ),
    "NaN in the gradients": (
        [
            of_rank(0, 9, "not finite", "first of all rank 1 had a gradient that was not", iteration=640),
            of_rank(0, 10, "error", "FloatingPointError: 10 steps in a row", iteration=640, cause="not finite"),
            of_launcher("node001", 11, "rank ended", rank=0, exit_code=1),
        ],
        "not finite",
        r"^rank 0 \(node001\), iteration 640: FloatingPointError: 10 steps",
    ),
    "one skipped step, then a killed rank": (
        [
            of_rank(0, 2, "not finite", "the step is skipped", iteration=610),
            of_launcher("node001", 10, "rank ended", rank=1, signal="SIGKILL"),
        ],
        "killed rank",
        "rank 1",
    ),
    "another weight on a replica": (
        [of_rank(2, 20, "error", "StateChanged: rank 2 holds another word_embeddings.weight", cause="replica drift")],
        "replica drift",
        "word_embeddings.weight",
    ),
    "a full disk": (
        [
            of_rank(
                1,
                9,
                "error",
                "OSError: iter_0000700.tmp-a/mp_rank_01/model.safetensors: cannot write its 4,096 "
                "bytes: No space left on device",
                cause="full disk",
            )
        ],
        "full disk",
        "^rank 1 .*No space left",
    ),
    "a damaged checkpoint": (
        [
            of_rank(
                0,
                2,
                "error",
                "run: holds no valid checkpoint: run/iter_0000600/mp_rank_00/model.safetensors: "
                "damaged: its sha256 is not the one in boxes/rank_00000.jsonl",
                exit_code=2,
                cause="damaged checkpoint",
            )
        ],
        "damaged checkpoint",
        "its sha256 is not the one",
    ),
    "a damaged token file": (
        [of_rank(0, 2, "error", "--data-path: corpus.idx is damaged: a negative length", cause="damaged data")],
        "damaged data",
        "corpus.idx is damaged",
    ),
    "out of memory": (
        [
            of_rank(2, 5, "error", "out of memory on rank 2: expected 9,000 MB in backward", cause="out of memory"),
            of_rank(0, 8, "lost", ranks=[2]),
            of_launcher("node002", 9, "rank ended", rank=2, exit_code=2),
        ],
        "out of memory",
        "^rank 2 .node002., iteration 634: out of memory on rank 2",
    ),
    "a bug": (
        [
            of_rank(3, 5, "error", "KeyError: 'learning_rate'", at="megatron/gpt2/train/loop.py:31"),
            of_rank(0, 5.1, "error", f"RuntimeError: {CLOSED}", cause="another rank"),
            of_rank(0, 8, "lost", ranks=[3]),
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
    "bad input": (
        [of_rank(0, 1, "error", "--micro-batch-size must be positive, not 0", cause="bad input")],
        "bad input",
        "--micro-batch-size",
    ),
    "a start that was refused": (
        [of_rank(0, 1, "refused", "--train-data x.txt: no such file", exit_code=2)],
        "bad input",
        r"^rank 0 .*: --train-data x\.txt: no such file$",
    ),
    "a start for which a machine was missing": (
        [
            of_rank(
                0,
                1,
                "refused",
                "rank 1 of 2 did not come within 120 s (--init-timeout); rank 0 (node001) did",
                cause="missing ranks",
            )
        ],
        "missing ranks",
        "^rank 0 .*: rank 1 of 2 did not come",
    ),
    "a killed node, and a restart without it": (
        [
            of_rank(0, 12, "lost", ranks=[2, 3], silences={"2": 4.0, "3": 4.1}),
            {**of_rank(0, 140, "refused", "ranks 2-3 of 4 did not come within 120 s", exit_code=2), "attempt": 1},
        ],
        "lost node",
        r"^ranks 2-3 on node002 fell silent",
    ),
    "a start that was refused beside the run": (
        [
            of_rank(0, 1, "refused", "--save run: process 7 saves there", exit_code=2),
            of_launcher("node001", 10, "rank ended", rank=1, signal="SIGKILL"),
        ],
        "killed rank",
        "rank 1",
    ),
    "a lost link": (
        [
            of_rank(0, 30, "lost", ranks=[2, 3], silences={"2": 30.0, "3": 30.0}),
            of_rank(1, 30, "lost", ranks=[2, 3], silences={"2": 30.0, "3": 30.0}),
            of_rank(2, 30, "lost", ranks=[0, 1], silences={"0": 30.0, "1": 30.0}),
            of_rank(3, 30, "lost", ranks=[0, 1], silences={"0": 30.0, "1": 30.0}),
        ],
        "lost link",
        "^ranks 0-3 lost each other",
    ),
    "a rank that is cut off from the others and the store": (
        [
            of_rank(1, 30, "lost", ranks=[0], silences={"0": 4.0}),
            of_rank(0, 30, "lost", ranks=[0], silences={"0": 4.0}),
        ],
        "lost link",
        "^rank 0 lost the others at iteration 634",
    ),
    "a job that the scheduler kills": (
        [of_launcher(host, 10 + rank / 10, "rank ended", rank=rank, signal="SIGKILL") for rank, host in HOSTS.items()],
        "killed job",
        "^4 ranks were ended by SIGKILL at once",
    ),
    "SIGTERM before the first step": (
        [of_launcher("node001", 3, "rank ended", rank=0, signal="SIGTERM")],
        "SIGTERM",
        "^rank 0 .* was ended by SIGTERM with exit code 143",
    ),
    "Ctrl-C twice": (
        [of_launcher("node001", 3, "rank ended", rank=0, signal="SIGINT")],
        "Ctrl-C",
        "^rank 0 .* was ended by SIGINT",
    ),
    "a crash loop": (
        [
            of_launcher("node001", 10, "rank ended", rank=1, signal="SIGSEGV"),
            of_launcher("node001", 11, "crash loop", "the same step, 635, failed three times"),
        ],
        "crash loop: crashed rank",
        "rank 1 .node001. was ended by SIGSEGV",
    ),
    "no power": ([], "without a word", "last word is of rank 3"),
    "an exit code and nothing else": (
        [of_launcher("node001", 3, "rank ended", rank=2, exit_code=7)],
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
    killed = of_launcher("node001", 10, "rank ended", rank=1, signal="SIGKILL")
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
