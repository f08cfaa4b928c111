"""tools/post_mortem.py on folders of runs."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from megatron.gpt2.config import Config, write_config
from megatron.gpt2.extensions.post_mortem.command import main
from megatron.gpt2.monitor.incidents import IncidentLog, rank_file_name
from tests.megatron.gpt2.checkpoint.saved_states import save


def failed_run(folder: Path) -> Path:
    """A run of two ranks, killed at iteration 9 of 100 and continued once before."""
    folder.mkdir(exist_ok=True)
    write_config(
        folder,
        Config.from_dict({"checkpoint": {"save": str(folder)}}),
        {"train_iters": 100, "global_batch_size": 8, "environment": {"command": "python pretrain.py --x 1"}},
        continues=False,
    )
    (folder / "metrics.jsonl").write_text("".join(json.dumps({"iteration": i}) + "\n" for i in range(1, 9)))
    save(folder, 5)
    save(folder, 7)
    for rank in (0, 1):
        IncidentLog(folder, rank_file_name(rank), attempt=1).note("start", iteration=7)
    IncidentLog(folder, "launcher_here", attempt=1).note(
        "rank ended", "rank 1 was ended by SIGKILL", rank=1, signal="SIGKILL"
    )
    IncidentLog(folder, rank_file_name(0), attempt=1).note(
        "lost", "rank 1 was lost", iteration=9, ranks=[1], silences={"1": 3.0}
    )
    return folder


def test_ten_lines_about_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = failed_run(tmp_path / "run")
    assert main([str(folder)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert 7 <= len(lines) <= 11 and len({line.index(line[14:].lstrip()) for line in lines[:1]}) == 1
    text = "\n".join(" ".join(line.split()) for line in lines)
    assert f"run {folder}, died, after iteration 9 of 100, started again 1 time\n" in text
    assert "\nfirst rank 1 (" in text and ") was ended by SIGKILL at iteration 9\n" in text
    assert "iteration 7 is the newest valid one; 2 iterations will be repeated" in text
    assert text.endswith("continue python pretrain.py --x 1")
    # A newer local checkpoint of the same run.
    (folder / "local_checkpoints").write_text("abc")
    save(folder.parent / "near" / "abc", 8)
    config = Config.from_dict(
        {
            "checkpoint": {
                "save": str(folder),
                "local_checkpoint_interval": 2,
                "local_checkpoint_dir": str(folder.parent / "near"),
            }
        }
    )
    write_config(folder, config, {"train_iters": 100, "global_batch_size": 8}, continues=False)
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
    """The machine that an elastic run has lost before is named."""
    (tmp_path / "run").mkdir()
    for rank, host in enumerate("ab"):
        IncidentLog(tmp_path / "run", rank_file_name(rank), host=host).note("start", iteration=0)
    IncidentLog(tmp_path / "run", rank_file_name(0), host="a").note("lost", iteration=3, ranks=[1], silences={"1": 4.0})
    folder = failed_run(tmp_path / "run")
    (folder / "ended.json").write_text(json.dumps({"reason": "SIGTERM", "iteration": 9, "exit_code": 0, "time": 1.0}))
    assert main([str(folder)]) == 1, "ended.json is from an earlier start"
    (folder / "ended.json").write_text(json.dumps({"reason": "SIGTERM", "iteration": 9, "exit_code": 0, "time": 9e12}))
    assert main([str(folder)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "ended well" in text and "first nothing: SIGTERM, at iteration 9" in text
    assert "before rank 1 on b stopped responding at iteration 3, as rank 0 (a), iteration 3 saw it" in text
    (folder / "ended.json").write_text(json.dumps({"reason": "", "iteration": 9, "exit_code": 0, "time": time.time()}))
    IncidentLog(folder, rank_file_name(0)).refused(ValueError("--lr -1"))
    assert main([str(folder)]) == 0, "a refused start changes nothing"
    (folder / "ended.json").write_text("{")
    assert main([str(folder)]) == 1


def test_a_folder_of_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="is not the folder of a run: give its --save folder"):
        main([str(tmp_path)])
