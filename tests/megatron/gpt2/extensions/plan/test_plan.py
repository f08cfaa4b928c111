from __future__ import annotations

import json
from typing import Any

import pytest

from data_utils.command_line import program
from megatron.gpt2.extensions.plan.command import main
from megatron.gpt2.monitor.reporting import resident_memory

MB = 2**20


def planned(capsys: pytest.CaptureFixture[str], flags: str, code: int = 0) -> dict[str, Any]:
    assert main([*flags.split(), "--json"]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize(
    ("p", "steady", "peak", "parameters"), [(1, 6785, 11927, 354_871_296), (2, 3447, 6238, 178_100_224)]
)
def test_the_published_run(capsys: pytest.CaptureFixture[str], p: int, steady: int, peak: int, parameters: int):
    """MB after 100 iterations and at the peak: fp16, 8 × 1,024 tokens, activation checkpointing."""
    flags = "--model 345m --recompute-granularity full --accounting megatron-2019 --model-parallel-size"
    found = planned(capsys, f"{flags} {p}")
    of_2019 = found["megatron_2019"]
    assert found["parameters"]["matrices_12lh2"] == 301_989_888
    assert of_2019["matrices_at_20_bytes"] == 6_039_797_760
    assert of_2019["from_step_to_step"] == sum(found["memory"][part] for part in ("weights", "gradients", "optimizer"))
    assert of_2019["from_step_to_step"] == 20 * parameters
    assert of_2019["from_step_to_step"] / MB == pytest.approx(steady, rel=0.02)
    assert found["memory"]["total"] / MB == pytest.approx(peak, rel=0.02)
    assert p > 1 or of_2019["activations_without_recompute"] == 22_951_231_488


def test_the_table_says_what_the_json_says(capsys: pytest.CaptureFixture[str]):
    flags = "--model 1.5b --device cuda --ranks 8 --memory-gb 20"
    found = planned(capsys, flags)
    assert main(flags.split()) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line for line in lines if line.endswith("%")]
    assert len({len(line) for line in rows}) == 1, "the rows line up"
    assert any(line.split()[:2] == ["all", f"{found['memory']['total'] / MB:,.0f}"] for line in rows)
    parts = {key: value for key, value in found["memory"].items() if key not in ("total", "moment", "on_host")}
    assert sum(parts.values()) == found["memory"]["total"] and len(rows) == 1 + sum(size > 0 for size in parts.values())
    fits = found["fits"]
    assert not fits["as_asked"] and len(fits["cheapest"]) == 3
    assert any(line.endswith(fits["cheapest"][0]["flags"]) for line in lines)
    # What is offered fits when it is asked for.
    again = planned(capsys, f"{flags} {fits['cheapest'][0]['flags']}")
    assert again["fits"]["as_asked"] and again["memory"]["total"] == fits["cheapest"][0]["bytes"]


def test_a_row_for_each_stage(capsys: pytest.CaptureFixture[str]):
    flags = "--model 345m --device cuda --pipeline-model-parallel-size 4 --micro-batch-size 4 --global-batch-size 32"
    found = planned(capsys, flags)
    assert main(flags.split()) == 0
    lines = capsys.readouterr().out.splitlines()
    pipeline, memory = found["pipeline"], found["memory"]
    assert found["ranks"] == 4 and found["data_parallel"] == 1
    # 1F1B, all stages alike: (p - 1) / (m + p - 1).
    assert (pipeline["schedule"], pipeline["micro_batches"], pipeline["bubble"]) == ("1f1b", 8, 0.2727)
    assert [stage["layers"] for stage in pipeline["stages"]] == [[[0, 5]], [[6, 11]], [[12, 17]], [[18, 23]]]
    totals = [stage["total"] for stage in pipeline["stages"]]
    assert memory["total"] == max(totals)
    assert memory["moment"] == pipeline["stages"][totals.index(max(totals))]["moment"]
    for number, total in enumerate(totals):
        assert any(line.split()[:1] == [str(number)] and line.endswith(f" {total / MB:,.0f}") for line in lines)
    assert any("27% of a step idle" in line for line in lines)


def test_nothing_is_allocated(capsys: pytest.CaptureFixture[str]):
    before = resident_memory()["peak resident"]
    found = planned(capsys, "--model 8.3b --model-parallel-size 8 --device cuda --ranks 512")
    assert found["memory"]["total"] > 20 * 2**30
    assert resident_memory()["peak resident"] - before < 50 * MB


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--num-layers 0", "--num-layers"),
        ("--memory-gb 0", "--memory-gb"),
        ("--ranks x", "--ranks"),
        ("--ranks 3 --model-parallel-size 2", "--model-parallel-size 2"),
        ("--no-such-flag", "--no-such-flag"),
        ("--accounting megatron-2019 --memory-gb 8", "--accounting"),
    ],
)
def test_bad_flags_end_in_one_line(capsys: pytest.CaptureFixture[str], flags: str, says: str):
    with pytest.raises(SystemExit, match="^2$"):
        program(lambda: main(flags.split()))()
    captured = capsys.readouterr()
    assert not captured.out and captured.err.startswith("error: ") and says in captured.err
    assert captured.err.count("\n") == 1


def test_what_cannot_fit_says_the_least(capsys: pytest.CaptureFixture[str]):
    flags = "--model 1.5b --device cuda --memory-gb 4"
    assert planned(capsys, flags, code=1)["fits"]["cheapest"] == []
    assert main(flags.split()) == 1
    assert "the least is" in capsys.readouterr().out
