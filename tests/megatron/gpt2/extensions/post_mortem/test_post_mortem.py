"""tools/post_mortem.py on folders of runs. The first cause of each kind of failure is found in incidents that are
written by hand."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from megatron.gpt2.config import Config, write_config
from megatron.gpt2.extensions.post_mortem.command import main
from megatron.gpt2.extensions.post_mortem.failure_analysis import KINDS, first_cause, last_attempt
from megatron.gpt2.monitor.incidents import INCIDENT_DEFAULTS, IncidentLog, rank_file_name
from tests.megatron.gpt2.checkpoint.saved_states import save


def failed_run(folder: Path) -> Path:
    """Make a run of two ranks that was killed at iteration 9 of 100 and continued once before."""
    folder.mkdir(exist_ok=True)
    local = {"local_checkpoint_interval": 2, "local_checkpoint_dir": str(folder.parent / "near")}
    run_values = {"train_iters": 100, "global_batch_size": 8, "environment": {"command": "python pretrain.py --x 1"}}
    config = Config.from_dict({"checkpoint": {"save": str(folder), **local}})
    write_config(folder, config, run_values, continues=False)
    (folder / "metrics.jsonl").write_text("".join(json.dumps({"iteration": i}) + "\n" for i in range(1, 9)))
    save(folder, 5)
    save(folder, 7)
    logs = [IncidentLog(folder, name, attempt=1) for name in (*map(rank_file_name, (0, 1)), "launcher_here")]
    for log in logs[:2]:
        log.note("start", iteration=7)
    logs[2].note("rank ended", "rank 1 was ended by SIGKILL", rank=1, signal="SIGKILL")
    logs[0].note("lost", "rank 1 was lost", iteration=9, ranks=[1], silences={"1": 3.0})
    return folder


def test_ten_lines_about_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = failed_run(tmp_path / "run")
    assert main([str(folder)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert 6 <= len(lines) <= 11
    text = "\n".join(" ".join(line.split()) for line in lines)
    assert f"run {folder}, died, after iteration 9 of 100, started again 1 time\n" in text
    assert "\nfirst rank 1 (" in text and ") was ended by SIGKILL at iteration 9\n" in text
    assert "iteration 7 is the newest valid one; 2 iterations will be repeated" in text
    assert text.endswith("continue python pretrain.py --x 1")
    # There is a newer local checkpoint of the same run.
    (folder / "local_checkpoints").write_text("abc")
    save(folder.parent / "near" / "abc", 8)
    assert main([str(folder)]) == 1
    assert (
        "iteration 7 is the newest valid one, and this machine has a local one of iteration 8; 1 iteration will be "
        "repeated" in capsys.readouterr().out
    )
    (folder / "local_checkpoints").unlink()
    # A damaged checkpoint is skipped, with a warning.
    next((folder / "iter_0000007").rglob("*.safetensors")).write_bytes(b"")
    assert main([str(folder)]) == 1
    assert "iteration 5 is the newest valid one; 4 iterations" in capsys.readouterr().out


def test_a_run_that_ended_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The report names a machine that the elastic run lost earlier."""
    (tmp_path / "run").mkdir()
    logs = [IncidentLog(tmp_path / "run", rank_file_name(rank), host=host) for rank, host in enumerate("ab")]
    for log in logs:
        log.note("start", iteration=0)
    logs[0].note("lost", iteration=3, ranks=[1], silences={"1": 4.0})
    folder = failed_run(tmp_path / "run")
    for when, code in ((1.0, 1), (9e12, 0)):  # An ended.json from an earlier start does not count.
        ended = {"reason": "SIGTERM", "iteration": 9, "exit_code": 0, "time": when}
        (folder / "ended.json").write_text(json.dumps(ended))
        assert main([str(folder)]) == code
    text = " ".join(capsys.readouterr().out.split())
    assert "ended well" in text and "first nothing: SIGTERM, at iteration 9" in text
    assert "before rank 1 on b stopped responding at iteration 3, as rank 0 (a), iteration 3 saw it" in text
    (folder / "ended.json").write_text(json.dumps(ended | {"time": time.time()}))
    IncidentLog(folder, rank_file_name(0)).refused(ValueError("--lr -1"))
    assert main([str(folder)]) == 0, "a refused start changes nothing"
    (folder / "ended.json").write_text("{")
    assert main([str(folder)]) == 1


def test_a_folder_of_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="is not the folder of a run: give its --save folder"):
        main([str(tmp_path)])


HOSTS = {0: "node001", 1: "node001", 2: "node002", 3: "node002"}
Line = dict[str, Any]


def rank_incident(rank: int, when: float, kind: str, text: str = "", /, **details: Any) -> Line:
    own = {"time": 1000.0 + when, "who": f"rank_{rank:05d}", "host": HOSTS[rank], "iteration": 634}
    return INCIDENT_DEFAULTS | own | {"kind": kind, "text": text, **details}


def launcher_incident(host: str, when: float, kind: str, text: str = "", /, **details: Any) -> Line:
    return rank_incident(0, when, kind, text, iteration=-1, **details) | {"who": f"launcher_{host}", "host": host}


def rank_ended(when: float, rank: int, how: str | int, first: bool = True) -> Line:
    """Return a launcher's incident.

    how: a signal or an exit code.
    """
    key = "signal" if isinstance(how, str) else "exit_code"
    return launcher_incident(HOSTS[rank], when, "rank ended", rank=rank, first=first, **{key: how})


def ranks_lost(rank: int, when: float, ranks: list[int], seconds: float | None = None) -> Line:
    return rank_incident(rank, when, "lost", ranks=ranks, silences={str(other): seconds for other in ranks})


def ranks_started(attempt: int = 0, at: float = 0.0) -> list[Line]:
    return [rank_incident(rank, at, "start", iteration=600, attempt=attempt) for rank in HOSTS]


CLOSED = "Connection closed by peer [10.0.0.3]:41052"
STACK_OF_DATA = ["megatron/gpt2/train/data.py:88 (next)", "data_utils/samplers.py:150 (batch)", "/x/np.py:3 (f)"]
STACK_OF_STEP = ["megatron/gpt2/train/train_step.py:30 (train_step)"]

# Each case is name: (incidents after the start, kind, pattern of the cause).
FAILURES: dict[str, tuple[list[Line], str, str]] = {
    "a killed rank": (
        [
            rank_incident(0, 9.9, "error", f"RuntimeError: {CLOSED}", cause="another rank"),
            rank_ended(10, 3, "SIGKILL"),
            ranks_lost(0, 13, [3], 3.2),
            rank_ended(14, 0, 1),
        ],
        "killed rank",
        r"^rank 3 \(node002\) was ended by SIGKILL at iteration 634",
    ),
    "a node whose ranks are all killed, and whose launcher lives": (
        [
            rank_ended(10, 2, "SIGKILL", first=False),
            rank_ended(10, 3, "SIGKILL"),
            ranks_lost(0, 14, [2, 3], 4.0),
            rank_ended(15, 0, 1),
        ],
        "killed node",
        r"^ranks 2-3, all of node002, were ended by SIGKILL at once at iteration 634$",
    ),
    "a stopped rank": (
        [ranks_lost(0, 31, [3], 31.0), ranks_lost(2, 31, [3]), rank_ended(40, 2, 1)],
        "silent rank",
        r"^rank 3 sent no heartbeat for 31 s at iteration 634",
    ),
    "a hang in data loading": (
        [
            rank_incident(0, 30, "hang", "waits in broadcast (mpu/data.py:3)", stack=STACK_OF_STEP),
            rank_incident(2, 30.1, "hang", "is at data_utils/samplers.py:150 (batch)", stack=STACK_OF_DATA),
            rank_incident(0, 30.2, "hang", "ranks 0, 1 and 3 wait for rank 2", ranks=[2], found_by=0),
            rank_incident(0, 33, "error", "RuntimeError: Timed out waiting 30000ms for recv", cause="another rank"),
            rank_ended(34, 0, 1),
        ],
        "hang in data loading",
        r"^rank 2 did not reach .* at data_utils/samplers.py:150",
    ),
    "out of memory": (
        [
            rank_incident(2, 5, "error", "expected 9,000 MB", cause="out of memory"),
            ranks_lost(0, 8, [2]),
            rank_ended(9, 2, 2),
        ],
        "out of memory",
        "^rank 2 .node002., iteration 634: expected 9,000 MB",
    ),
    "a bug": (
        [
            rank_incident(3, 5, "error", "KeyError: 'learning_rate'", at="megatron/gpt2/train/loop.py:31"),
            rank_incident(0, 5.1, "error", f"RuntimeError: {CLOSED}", cause="another rank"),
            ranks_lost(0, 8, [3]),
        ],
        "an error of the program",
        r"^rank 3 .*KeyError: 'learning_rate', at megatron/gpt2/train/loop.py:31$",
    ),
    "a killed node, and a restart without it": (
        [
            ranks_lost(0, 12, [2, 3], 4.0),
            {**rank_incident(0, 140, "refused", "ranks 2-3 of 4 did not join within 120 s", exit_code=2), "attempt": 1},
        ],
        "lost node",
        r"^ranks 2-3 on node002 stopped responding",
    ),
    "a rank that is cut off from the others and the store": (
        [ranks_lost(1, 30, [0], 4.0), ranks_lost(0, 30, [0], 4.0)],
        "lost link",
        "^rank 0 lost the others at iteration 634",
    ),
    "a job that the scheduler kills": (
        [rank_ended(10 + rank / 10, rank, "SIGKILL") for rank in HOSTS],
        "killed job",
        "^4 ranks were ended by SIGKILL at once",
    ),
    "a crash loop": (
        [rank_ended(10, 1, "SIGSEGV"), launcher_incident("node001", 11, "crash loop", "three times at step 635")],
        "crashed rank",
        "rank 1 .node001. was ended by SIGSEGV; three times at step 635",
    ),
    **{
        str(how): ([rank_ended(3, 2, how)], kind, f"^rank 2 .* ended .*{how}")
        for how, kind in (("SIGSEGV", "crashed rank"), ("SIGTERM", "SIGTERM"), ("SIGINT", "Ctrl-C"), (7, "exit code"))
    },
    # The error has an attribute with this cause.
    **{
        cause: ([rank_incident(1, 9, kind, "an error", cause=cause)], cause, "^rank 1 .*: an error$")
        for kind, causes in (("error", ("full disk", "damaged data")), ("refused", ("missing ranks", "bad input")))
        for cause in causes
    },
    "no power": ([], "silent end", "last message is from rank 3"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_the_first_cause_is_named(name: str) -> None:
    noted, kind, said = FAILURES[name]
    failure = first_cause([*ranks_started(), *noted], {})
    assert failure.kind == kind and re.search(said, failure.cause), failure
    assert not failure.is_success and kind in KINDS and "\n" not in failure.cause and len(failure.cause) < 400


def test_a_run_that_ended_with_an_error_code() -> None:
    assert first_cause([*ranks_started()], {"exit_code": 1}).kind == "exit code"
    assert first_cause([], {}).kind == "silent end"


def test_earlier_attempts_are_ignored() -> None:
    """Only the last start counts, even if earlier runs in this folder failed."""
    killed = rank_ended(10, 1, "SIGKILL")
    again = [*ranks_started(attempt=1, at=20), rank_incident(2, 30, "error", "KeyError: 'x'") | {"attempt": 1}]
    restart = launcher_incident("node001", 15, "restart")
    assert first_cause([*ranks_started(), killed, restart, *again], {}).kind == "an error of the program"
    refused = rank_incident(0, 40, "refused", "--lr -1", exit_code=2)
    assert last_attempt([*ranks_started(), killed, restart, *again, refused]) == [refused]
    by_hand = [*ranks_started(at=5000), rank_incident(2, 5030, "error", "KeyError: 'x'")]
    assert last_attempt([*ranks_started(), killed, *by_hand]) == by_hand
    # An elastic run continues without rank 3, which never starts again.
    fewer = [line for line in again if line["who"] != "rank_00003"]
    assert last_attempt([*ranks_started(), killed, restart, *fewer]) == fewer
