"""Test the model of other programs' step times: its errors on measured rows and published tables, and its parts."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from megatron.gpt2.extensions.plan.cluster import read_cluster
from megatron.gpt2.extensions.plan.step_time import Layouts

ROOT = Path(__file__).resolve().parents[2]
ONE = Layouts(16, 2, 1024, 16, 24, 1024, 2, 2, 2)
ROW = {name: value for name, value in asdict(ONE).items() if name != "virtual_stages"}


def step_times(*words: str | Path) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, ROOT / "benchmarks" / "step_times.py", *words]
    return subprocess.run(line, capture_output=True, text=True, timeout=120)


def test_errors_on_measured_rows_stay_within_their_limits(test_data: Path) -> None:
    """The limits are a little above the errors of the committed constants, so a change of the model is noticed."""
    for name, mean, median in (("a100_one_node", 0.039, 0.022), ("a100_many_nodes", 0.09, 0.07)):
        found = json.loads(step_times(test_data / "step-times" / f"{name}.csv", "--json").stdout)
        assert found["rows"] > 70
        assert found["mean_absolute_relative_error"] < mean
        assert found["percentiles"]["50"] < median
        assert 0.7 < found["interval"]["share_inside"] < 0.9
        assert found["first_choice"]["share_within_5_percent"] > 0.7


def test_published_tables_are_met_with_the_same_constants_of_the_gpu() -> None:
    a100, selene = read_cluster("a100")[0], read_cluster("selene")[0]
    assert replace(selene, network=a100.network, network_send=a100.network_send) == a100
    tables = json.loads(step_times("--published", "--json").stdout)
    assert sum(map(len, tables.values())) == 26
    for title, rows in tables.items():
        assert max(abs(row["error"]) for row in rows) < (0.03 if "2020" in title else 0.06), title


@pytest.mark.parametrize(
    "line, milliseconds, words",
    [
        ("rows.csv --cluster unknown", "220", ["--cluster unknown", "a100"]),
        ("rows.csv", "soon", ["rows.csv, line 2", "ms_per_iteration"]),
        ("missing.csv", "220", ["missing.csv"]),
    ],
)
def test_bad_input_ends_in_one_line(line: str, milliseconds: str, words: list[str], tmp_path: Path) -> None:
    row = {**ROW, "ms_per_iteration": milliseconds}
    (tmp_path / "rows.csv").write_text(",".join(row) + "\n" + ",".join(map(str, row.values())) + "\n")
    name, *flags = line.split()
    done = step_times(tmp_path / name, *flags)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert all(word in done.stderr for word in words)
