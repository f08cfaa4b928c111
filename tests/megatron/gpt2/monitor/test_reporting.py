"""Log lines in Megatron's form, metrics.jsonl over a resume, the loss curve with and without matplotlib."""

from __future__ import annotations

import json
import math
import resource
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from data_utils.command_line import NoProgressBar, progress_bar
from megatron.gpt2.monitor import plots, reporting
from megatron.gpt2.monitor.reporting import EvaluationRecord, IterationRecord
from megatron.gpt2.monitor.run_log import RunLog


def record(iteration: int = 100, **changes: Any) -> IterationRecord:
    values = {
        "consumed_samples": 800,
        "lm_loss": 8.969456,
        "learning_rate": 3.937e-6,
        "loss_scale": 131072.0,
        "grad_norm": 1.234,
        "ms_per_iteration": 920.7,
        "tokens_per_second": 12345.0,
        "mfu": 0.234,
        "memory_bytes": 1 << 30,
    }
    return IterationRecord(iteration, **{**values, **changes})


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_iteration_line() -> None:
    assert reporting.iteration_line(record(), train_iters=320000, seconds_to_go=4983.2) == (
        "iteration      100/  320000 | elapsed time per iteration (ms): 920.7 | learning rate: 3.937E-06 | "
        "lm loss: 8.969456E+00 | loss scale: 131072.0 | grad norm: 1.234 | tokens/s: 12,345 | MFU: 23.4% | "
        "time to go: 1:23:03 |"
    )


def test_iteration_line_says_skipped_and_leaves_out_an_unknown_mfu() -> None:
    line = reporting.iteration_line(record(mfu=None), train_iters=200, seconds_to_go=1, skipped=16)
    assert "MFU" not in line
    assert line.endswith("| number of skipped iterations: 16 |")


def test_iteration_line_of_a_window_without_a_step() -> None:
    line = reporting.iteration_line(record(lm_loss=None, grad_norm=None), train_iters=200, seconds_to_go=1, skipped=100)
    assert "| lm loss: skipped |" in line and "| grad norm: skipped |" in line


def test_evaluation_line() -> None:
    evaluation = EvaluationRecord(1000, "valid", math.log(20.0), 1.5)
    frame, line, same = reporting.evaluation_line(evaluation).split("\n")
    assert line == (
        "validation loss at iteration 1000 | LM loss: 2.995732E+00 | LM PPL: 2.000000E+01 | bits per byte: 1.5000"
    )
    assert frame == same == "-" * len(line)
    final = reporting.evaluation_line(EvaluationRecord(1000, "test", 3.0), final=True)
    assert "validation loss at the end of training for test data | LM loss: 3.000000E+00 |" in final
    assert "the end of training for val data" in reporting.evaluation_line(evaluation, final=True)


def test_perplexity_of_a_run_that_exploded() -> None:
    assert EvaluationRecord(1, "valid", 1e6).ppl == math.inf


def test_start_table_is_aligned() -> None:
    table = reporting.start_table([("model", "345m"), ("parameters", "354,871,296")], [("--lr", "0.00015 (0.0001)")])
    lines = table.split("\n")
    assert lines[1].index("345m") == lines[2].index("354,")
    assert "--lr  0.00015 (0.0001)" in table


def test_memory_line_on_a_cpu() -> None:
    line = reporting.memory_line(torch.device("cpu"))
    peak = float(line.split("peak resident: ")[1].replace(",", ""))
    assert 20 < peak < 100_000  # MB: a Python with torch loaded
    assert reporting.peak_memory(torch.device("cpu")) >= int(peak * 2**20) - 2**17  # a tenth of a MB is what is printed


def test_metrics_hold_one_record_a_line_and_no_nan(tmp_path: Path) -> None:
    log = RunLog(tmp_path, train_iters=10)
    log.record(record(10, grad_norm=math.nan))
    # Flushed line by line: a crash leaves what was logged.
    assert read(log.metrics_path) == [
        {
            "iteration": 10,
            "consumed_samples": 800,
            "lm_loss": 8.969456,
            "learning_rate": 3.937e-6,
            "loss_scale": 131072.0,
            "grad_norm": None,
            "ms_per_iteration": 920.7,
            "tokens_per_second": 12345.0,
            "mfu": 0.234,
            "memory_bytes": 1 << 30,
        }
    ]
    log.record(EvaluationRecord(10, "valid", 0.0, 1.5))
    assert read(log.metrics_path)[1] == {
        "iteration": 10,
        "split": "valid",
        "lm_loss": 0.0,
        "bits_per_byte": 1.5,
        "ppl": 1.0,
    }
    log.close()


def test_a_full_disk_costs_the_records_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = write_run(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        log.record(record(110))
        log.sample("a text")
        log.note("a note")
        assert log.close() == ""
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert capsys.readouterr().out.splitlines() == [
        f"WARNING: {line}: File too large"
        for line in ("metrics.jsonl lacks lines from here on", "report.html is not written", "loss.png is not written")
    ]
    assert len(read(log.metrics_path)) == 11


def test_resume_leaves_no_duplicates(tmp_path: Path) -> None:
    log = RunLog(tmp_path, train_iters=30)
    for iteration in (10, 20):
        log.record(record(iteration))
    log.record(EvaluationRecord(20, "valid", 1.0))
    log.close()
    with log.metrics_path.open("a") as file:
        file.write('{"iteration": 25, "lm_lo')  # the crash
    log = RunLog(tmp_path, train_iters=30, start_iteration=15)
    assert [line["iteration"] for line in read(log.metrics_path)] == [10]
    log.record(record(20))
    log.close()
    assert [line["iteration"] for line in read(log.metrics_path)] == [10, 20]


def test_a_new_run_in_an_old_folder_sets_the_old_records_aside(tmp_path: Path) -> None:
    for iteration in (10, 20, 30):
        log = RunLog(tmp_path, train_iters=30)
        log.record(record(iteration))
        log.close()
    assert [read(tmp_path / f"metrics.jsonl{end}")[0]["iteration"] for end in (".old-1", ".old-2", "")] == [10, 20, 30]


def test_only_the_active_rank_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = RunLog(tmp_path / "run", train_iters=10, active=False)
    log.info("hello")
    log.record(record())
    log.step()
    assert log.close() == ""
    assert not (tmp_path / "run").exists()
    assert capsys.readouterr().out == ""


def test_progress_bar_on_a_terminal_keeps_lines_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    log = RunLog(tmp_path, train_iters=10, start_iteration=4)
    log.step()
    assert log.progress.n == 5
    log.info("a line")
    log.close()
    assert capsys.readouterr().out == "a line\n"  # the bar itself is on standard error


def test_no_progress_bar_in_a_file_or_without_tqdm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(progress_bar(total=10), NoProgressBar)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert isinstance(progress_bar(total=10), NoProgressBar)


def write_run(folder: Path) -> RunLog:
    log = RunLog(folder, train_iters=100)
    for iteration in range(10, 101, 10):
        log.record(record(iteration, lm_loss=8.0 - iteration / 20))
    log.record(EvaluationRecord(100, "valid", 3.5))
    return log


def test_loss_curve_is_a_png(tmp_path: Path) -> None:
    from matplotlib.image import imread

    path = write_run(tmp_path).close("a run")
    assert path == str(tmp_path / "loss.png")
    image = imread(path)
    blue, orange = (
        torch.tensor(image)[..., :3].sub(torch.tensor(colour)).abs().amax(-1).lt(0.1).sum().item()
        for colour in ((0x35 / 255, 0x68 / 255, 0xA8 / 255), (0xD1 / 255, 0x64 / 255, 0x2E / 255))
    )
    assert blue > 300  # the training curve is drawn,
    assert orange > 30  # and the one validation point


@pytest.mark.parametrize("records", [[], [record(1)], [record(1, lm_loss=math.nan)]])
def test_hardly_anything_has_no_loss_curve(tmp_path: Path, records: list[IterationRecord]) -> None:
    log = RunLog(tmp_path, train_iters=1)
    for one in records:
        log.record(one)
    assert log.close() == "" and not (tmp_path / "loss.png").exists()


def test_text_curve_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    text = write_run(tmp_path).close("a run")
    rows = text.split("\n")
    assert rows[0] == "a run"
    assert rows[1].startswith("    7.500 |*")  # iteration 10, the highest
    assert rows[-3].startswith("    3.000 |") and rows[-3].endswith("*")  # iteration 100, the lowest
    assert not (tmp_path / "loss.png").exists()


def test_text_curve_of_nothing() -> None:
    assert plots.text_curve([], "a run") == "a run: no iteration was logged"


def test_closing_report() -> None:
    commands = [("continue", "bash scripts/pretrain_gpt2.sh --train-iters 1000")]
    report = reporting.closing_report(
        bits_per_byte=2.1,
        baselines={reporting.UNIGRAM: 4.5, "xz -9": None},
        sample="[To be] or\nnot " + 30 * "word ",
        checkpoint="checkpoints/iter_0000300",
        plot="checkpoints/loss.png",
        next_commands=commands,
    )
    for line in (
        "  this model                     2.100",
        "  unigram entropy of the tokens  4.500",
        "  xz -9                          not computed",
        "  [To be] or",
        "  not" + 19 * " word",
        " " + 11 * " word",
        "  checkpoint  checkpoints/iter_0000300",
        "  loss curve  checkpoints/loss.png",
        "  bash scripts/pretrain_gpt2.sh --train-iters 1000",
    ):
        assert line in report.split("\n")
    assert "--lr" not in report
    bad = reporting.closing_report(
        bits_per_byte=4.6, baselines={reporting.UNIGRAM: 4.5}, sample="", checkpoint="x", plot="x", next_commands=[]
    )
    assert "a higher --lr" in bad
    with_text = reporting.closing_report(
        bits_per_byte=None, baselines={}, sample="", checkpoint="x", plot="curve\n 1 |*", next_commands=[]
    )
    assert " 1 |*" in with_text.split("\n")
    assert "curve" not in reporting.closing_report(
        bits_per_byte=None, baselines={}, sample="", checkpoint="x", plot="", next_commands=[]
    )
