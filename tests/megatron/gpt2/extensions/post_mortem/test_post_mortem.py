"""Test tools/post_mortem.py on the folder of a failed run, and on incidents of each kind of failure that are written by
hand."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from megatron.gpt2.config import Config, write_config
from megatron.gpt2.extensions.post_mortem.command import main
from megatron.gpt2.extensions.post_mortem.failure_analysis import KINDS, earlier_causes, first_cause, last_attempt
from megatron.gpt2.monitor.incidents import INCIDENT_DEFAULTS, IncidentLog, rank_file_name
from tests.megatron.gpt2.checkpoint.saved_states import save


def make_failed_run(folder: Path) -> None:
    """Make the folder of a run of two ranks that was continued once and then killed at iteration 9 of 100."""
    folder.mkdir()
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


def test_ten_lines_about_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = tmp_path / "run"
    make_failed_run(folder)
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
    # A damaged checkpoint is skipped.
    next((folder / "iter_0000007").rglob("*.safetensors")).write_bytes(b"")
    assert main([str(folder)]) == 1
    assert (
        "iteration 5 is the newest valid one, and this machine has a local one of iteration 8; 1 iteration will be "
        "repeated" in capsys.readouterr().out
    )
    # The report ignores the file ended.json of an earlier start, and a later start that is refused.
    for when, code in ((1.0, 1), (time.time(), 0)):
        ended = {"reason": "SIGTERM", "iteration": 9, "exit_code": 0, "time": when}
        (folder / "ended.json").write_text(json.dumps(ended))
        assert main([str(folder)]) == code
    IncidentLog(folder, rank_file_name(0)).refused(ValueError("--lr -1"))
    assert main([str(folder)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "ended well" in text and "first nothing: SIGTERM, at iteration 9" in text


def test_a_folder_of_no_run_is_refused(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="is not the folder of a run: give its --save folder"):
        main([str(tmp_path)])


HOSTS = {0: "node001", 1: "node001", 2: "node002", 3: "node002"}
Line = dict[str, Any]


def rank_incident(rank: int, when: float, kind: str, text: str = "", /, **details: Any) -> Line:
    own = {"time": 1000.0 + when, "who": f"rank_{rank:05d}", "host": HOSTS[rank], "iteration": 634}
    return INCIDENT_DEFAULTS | own | {"kind": kind, "text": text, **details}


def launcher_incident(rank: int, when: float, kind: str, text: str = "", /, **details: Any) -> Line:
    """Return an incident that the launcher on the machine of `rank` recorded."""
    return rank_incident(rank, when, kind, text, **details) | {"who": f"launcher_{HOSTS[rank]}", "iteration": -1}


def rank_ended(when: float, rank: int, how: str | int, first: bool = True) -> Line:
    """Return a launcher's incident.

    how: a signal or an exit code.
    """
    key = "signal" if isinstance(how, str) else "exit_code"
    return launcher_incident(rank, when, "rank ended", rank=rank, first=first, **{key: how})


def ranks_lost(rank: int, when: float, ranks: list[int], seconds: float | None = None) -> Line:
    return rank_incident(rank, when, "lost", ranks=ranks, silences={str(other): seconds for other in ranks})


def ranks_started(attempt: int = 0, at: float = 0.0) -> list[Line]:
    return [rank_incident(rank, at, "start", iteration=600, attempt=attempt) for rank in HOSTS]


# {name of the case: (incidents after the start, expected kind of failure, pattern of the expected cause)}
FAILURES: dict[str, tuple[list[Line], str, str]] = {
    "a killed rank": (
        [
            rank_incident(0, 9.9, "error", "RuntimeError: Connection closed by peer", cause="another rank"),
            rank_ended(10, 3, "SIGKILL"),
            ranks_lost(0, 13, [3], 3.2),
        ],
        "killed rank",
        r"^rank 3 \(node002\) was ended by SIGKILL at iteration 634",
    ),
    "a node whose ranks are all killed, and whose launcher lives": (
        [rank_ended(10, 2, "SIGKILL", first=False), rank_ended(10, 3, "SIGKILL"), ranks_lost(0, 14, [2, 3], 4.0)],
        "killed node",
        r"^ranks 2-3, all of node002, were ended by SIGKILL at once at iteration 634$",
    ),
    "a stopped rank": (
        [ranks_lost(0, 31, [3], 31.0), ranks_lost(2, 31, [3])],
        "silent rank",
        r"^rank 3 sent no heartbeat for 31 s at iteration 634",
    ),
    "a hang in data loading": (
        [
            rank_incident(0, 30, "hang", stack=["megatron/gpt2/train/train_step.py:30 (train_step)"]),
            rank_incident(2, 30.1, "hang", stack=["data_utils/samplers.py:150 (batch)", "/x/np.py:3 (f)"]),
            rank_incident(0, 30.2, "hang", "ranks 0, 1 and 3 wait for rank 2", ranks=[2], found_by=0),
        ],
        "hang in data loading",
        r"^rank 2 did not reach .* at data_utils/samplers.py:150",
    ),
    "a bug": (
        [
            rank_incident(3, 5, "error", "KeyError: 'learning_rate'", at="megatron/gpt2/train/loop.py:31"),
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
        [rank_ended(10, 1, "SIGSEGV"), launcher_incident(1, 11, "crash loop", "three times at step 635")],
        "crashed rank",
        "rank 1 .node001. was ended by SIGSEGV; three times at step 635",
    ),
    "Ctrl-C": ([rank_ended(3, 2, "SIGINT")], "Ctrl-C", "^rank 2 .* ended .*SIGINT"),
    "an exit code": ([rank_ended(3, 2, 7)], "exit code", "^rank 2 .* ended .*7"),
    "a refused start": (
        [rank_incident(1, 9, "refused", "an error", cause="missing ranks")],
        "missing ranks",
        "^rank 1 .*: an error$",
    ),
    "no power": ([], "silent end", "last message is from rank 3"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_the_first_cause_is_named(name: str):
    incidents, kind, pattern = FAILURES[name]
    failure = first_cause([*ranks_started(), *incidents], {})
    assert failure.kind == kind and re.search(pattern, failure.cause), failure
    assert not failure.is_success and kind in KINDS


def test_earlier_attempts_are_ignored() -> None:
    """Only the last start counts, even if earlier runs in this folder failed."""
    killed = rank_ended(10, 1, "SIGKILL")
    again = [*ranks_started(attempt=1, at=20), rank_incident(2, 30, "error", "KeyError: 'x'") | {"attempt": 1}]
    earlier = [*ranks_started(), killed, launcher_incident(0, 15, "restart")]
    assert first_cause([*earlier, *again], {}).kind == "an error of the program"
    assert earlier_causes([*earlier, *again]) == ["rank 1 (node001) was ended by SIGKILL"]
    refused = rank_incident(0, 40, "refused", "--lr -1", exit_code=2)
    assert last_attempt([*earlier, *again, refused]) == [refused]
    # An elastic run continues without rank 3, which never starts again.
    fewer = [line for line in again if line["who"] != "rank_00003"]
    assert last_attempt([*earlier, *fewer]) == fewer
