"""incidents/: what each process of a run saw, read together."""

from __future__ import annotations

from pathlib import Path

from megatron.gpt2.monitor.incidents import FOLDER, Incidents, rank_name, read_incidents


def test_the_files_of_all_are_read_by_time(tmp_path: Path) -> None:
    first, second = Incidents(tmp_path, rank_name(0)), Incidents(tmp_path, "launcher_a", attempt=1)
    first.note("start")
    second.note("rank ended", "rank 1 was ended by SIGKILL", signal="SIGKILL")
    first.note("lost", "rank 1 left", iteration=7)
    with open(tmp_path / FOLDER / "rank_00000.jsonl", "a") as file:
        file.write('{"half of a li')
    found = read_incidents(tmp_path)
    assert [record["kind"] for record in found] == ["start", "rank ended", "lost"]
    assert [record["who"] for record in found] == ["rank_00000", "launcher_a", "rank_00000"]
    assert found[1]["signal"] == "SIGKILL" and found[1]["attempt"] == 1 and found[2]["iteration"] == 7


def test_a_folder_that_cannot_be_written_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / FOLDER).write_text("a file in the place of the folder")
    Incidents(tmp_path, rank_name(0)).note("start")
    assert read_incidents(tmp_path) == []
