"""Test the content of report.html, that the page runs no script and loads nothing, and when it is written."""

from __future__ import annotations

import html
import json
import re
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.gpt2.commands import pretrain_gpt2
from megatron.gpt2.config import Config, write_config
from megatron.gpt2.monitor import plots, run_log
from megatron.gpt2.monitor.html_report import MOST_SAMPLES, write_report
from megatron.gpt2.monitor.incidents import read_records
from megatron.gpt2.monitor.plots import BLUE, Curve, loss_curves
from megatron.gpt2.monitor.run_log import RunLog
from megatron.gpt2.train.evaluate import PROMPT_CHARACTERS, PROMPT_WORDS, evaluate_and_log, sample_text
from tests.conftest import tool
from tests.megatron.gpt2.monitor.test_log_lines import record, write_run
from tests.megatron.gpt2.train.training_runs import finish, snapshot, start, steps, write_text
from tests.test_command_line import FLAGS

NASTY = "</td></table><script>alert(1)</script>\n<img src=x onerror=alert(2)> \"&'\ud800\x00"
TITLES = {
    "loss, nats per token",
    "learning rate",
    "gradient norm, before clipping",
    "tokens a second, all ranks",
    "peak memory of rank 0, GiB",
}


def texts(path: Path) -> dict[str, list[str]]:
    """Return {tag: texts that follow this tag} of an HTML page."""
    found: dict[str, list[str]] = {}
    for tag, text in re.findall(r"<(\w+)[^<>]*>([^<]*)", path.read_text(encoding="utf-8")):
        found.setdefault(tag, []).append(html.unescape(text))
    return found


def panels(page: dict[str, list[str]]) -> set[str]:
    return {text for text in page.get("text", []) if text in TITLES}


def test_the_page(tmp_path: Path) -> None:
    folder = tmp_path / 'a <b> & "c"'
    log = write_run(folder)
    for text in [NASTY, *["To be"] * 99]:
        log.sample(text)
    log.note("WARNING: " + NASTY)
    config = Config.from_dict({"data": {"train_data": ["a<b.txt", "c.txt"]}, "checkpoint": {"save": NASTY}})
    write_config(folder, config, {"environment": {"command": NASTY}}, continues=False)
    path = write_report(folder)
    page = texts(path)
    assert path.stat().st_size < 200_000 and not list(folder.glob("*.tmp"))
    assert page["title"] == page["h1"] == ['a <b> & "c"']
    # The page loads nothing, and no script may run.
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"https?:|url\((?!#)|@import|<script|<[^<>]*\s(src|href|onerror)=", text)
    assert all(link.startswith("#") for link in re.findall('xlink:href="(.*?)"', text))
    assert "content=\"default-src 'none'; style-src 'unsafe-inline'\"" in text
    # Text from records is escaped.
    shown = [cell for cell in page["td"] if "alert(1)" in cell]
    assert len(shown) == 5 and all("<script>alert(1)</script>\n<img" in cell for cell in shown)

    assert page["dd"] == ["100", "3", "3.5"] and "at 100" in page["span"]
    assert panels(page) == TITLES and {"training", "validation"} <= set(page["text"])
    assert text.count('class="sample"') == 34 < MOST_SAMPLES and "34 of 100: all are in samples.jsonl" in page["p"]
    assert {"a<b.txt c.txt", "--vocab-file"} <= set(page["td"])


def test_the_page_of_an_almost_empty_run(tmp_path: Path) -> None:
    page = texts(write_report(tmp_path))
    assert not panels(page) and "no iteration was logged yet" in page["p"]
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps(asdict(record(i, memory_bytes=None))) + "\n" for i in (5, 10)) + '{"iteration": 2'
    )
    page = texts(write_report(tmp_path))
    assert panels(page) == TITLES - {"peak memory of rank 0, GiB"} and "10" in page["dd"]


def test_a_long_curve_is_drawn_as_means_with_a_band() -> None:
    spiky = [(i, 100.0 if i == 777 else 1.0) for i in range(1, 2001)]
    axes: Any = plots.draw_figure({"t": [Curve("c", BLUE, spiky)]}).axes[0]
    x, y = axes.lines[0].get_data()
    assert len(x) <= 320 and x[-1] == 2000 and max(y) < 20
    assert axes.collections[0].get_paths()[0].vertices[:, 1].max() == 100  # A single outlier remains visible.


def test_a_run_that_is_stopped_and_continued(work: Path, capfd: pytest.CaptureFixture[str]) -> None:
    line = (
        "--train-data text.txt --save run --load run --eval-interval 2 --eval-iters 1 --log-interval 1 "
        "--save-interval 3 --train-iters"
    )
    flags = [*FLAGS, *line.split(), "8"]
    assert pretrain_gpt2.main([*flags, "--exit-interval", "5"]) == 0
    page = texts(work / "run/report.html")
    assert page["p"][0] == "stopped by --exit-interval at iteration 5: the same command continues"
    assert "learning rate" in panels(page) and "5" in page["dd"]
    # Two steps are repeated, as after a crash.
    shutil.rmtree(work / "run/iter_0000005")
    (work / "run/latest_checkpointed_iteration.txt").write_text("3\n")
    assert pretrain_gpt2.main(flags) == 0
    capfd.readouterr()
    assert texts(work / "run/report.html")["p"][0] == "finished"
    training, validation = loss_curves(read_records(work / "run/metrics.jsonl"))
    assert [i for i, _ in training.points] == [*range(1, 9)] and [i for i, _ in validation.points] == [2, 4, 6, 8]
    assert [sample["iteration"] for sample in read_records(work / "run/samples.jsonl")] == [2, 4, 6, 8, 8, 8]
    history = [(event["iteration"], event["text"][:23]) for event in read_records(work / "run/history.jsonl")]
    # The first line was printed before the log existed.
    begin = [(0, "WARNING: --load run hol"), (0, "started from random wei"), (5, "stopped by --exit-inter")]
    assert history == [*begin, (3, "started from iteration "), (8, "finished")]
    environment = json.loads((work / "run/config.json").read_text())["environment"]
    assert re.fullmatch(r"[0-9a-f]{40}(, with changes)?|none: .*", environment["commit"])

    # The command `gpt2 report` writes the same page, except for the time.
    before = (work / "run/report.html").read_text()
    assert tool("report").main(["run"]) == 0 and capfd.readouterr().out == "run/report.html\n"
    after = (work / "run/report.html").read_text()
    assert re.sub("written on [^<]*", "", after) == re.sub("written on [^<]*", "", before)
    # A failed run also writes its page.
    diverge = "12 --lr 1e30 --override-lr-scheduler --clip-grad 0 --max-skipped-steps 1"
    assert pretrain_gpt2.main([*flags[:-1], *diverge.split()]) == 1
    assert texts(work / "run/report.html")["p"][0].startswith("stopped: 1 step in a row ")


def test_samples_and_evaluations_do_not_change_training(tmp_path: Path) -> None:
    write_text(tmp_path)
    ends = []
    for watched in (False, True):
        flags = f"--save {tmp_path}/{watched} --hidden-dropout 0.1 --attention-dropout 0.1 --eval-iters 1"
        trainer = start(0, 1, tmp_path, flags)
        for _ in range(3):
            steps(trainer, 1)
            if watched:
                assert evaluate_and_log(trainer, "valid") is not None
                text, *more = sample_text(trainer, count=3).split("\n\n[")
                assert len(more) == 2
                data: Any = trainer.data
                begin = data.tokenizer.decode(data.splits.valid.tokens[:30]).split()[:PROMPT_WORDS]
                assert text.startswith(f"[{' '.join(begin)[:PROMPT_CHARACTERS]}]") and len(text) > 40
        ends.append(snapshot(trainer))
        finish(trainer)
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_the_report_takes_little_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, written = [1000.0], []
    log = RunLog(tmp_path, train_iters=10)

    def write(folder: Path) -> None:
        written.append(now[0])
        now[0] += 0.5

    monkeypatch.setattr("megatron.gpt2.monitor.run_log.time.monotonic", lambda: now[0])
    monkeypatch.setattr(run_log, "write_report", write)
    for _ in range(20):
        log.report()
        now[0] += 10
    assert written == [
        1000.0,
        1050.5,
        1101.0,
        1151.5,
    ]  # Writing takes 0.5 s, so there are at least 50 s between two reports.
