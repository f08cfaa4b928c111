"""How runs end: with the report, without the last checkpoint, or in steps that are all skipped."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import signal
import threading
from pathlib import Path

import pytest
from tqdm import TMonitor

from megatron.gpt2.commands import pretrain_gpt2
from megatron.gpt2.monitor.incidents import read_incidents
from megatron.gpt2.train import loop
from megatron.gpt2.train.run import Run
from megatron.gpt2.train.train_step import train_step
from tests.test_command_line import FLAGS, metrics, work  # noqa: F401


def test_a_stop_in_the_last_step_leaves_the_end_as_it_is(
    work: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Evaluations, report and exit code, whatever asks for the stop."""
    flags = [*FLAGS, *"--train-data text.txt --eval-iters 1 --train-iters 2".split()]

    def with_sigterm(run: Run) -> None:
        train_step(run)
        if run.progress.iteration == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    for name, more in (("interval", ["--exit-interval", "2"]), ("sigterm", [])):
        if name == "sigterm":
            monkeypatch.setattr(loop, "train_step", with_sigterm)
        assert pretrain_gpt2.main([*flags, "--save", name, *more]) == 0
        said, _ = capfd.readouterr()
        assert "stopped" not in said and "the end of training for test data" in said and "next:" in said
        assert f"{name}/iter_0000002\n" in said and (work / name / "iter_0000002").is_dir()


def test_a_disk_that_fills_at_the_last_save(work: Path, capfd: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    """The report names what is there; the error is one line, and the exit code 1."""
    flags = [*FLAGS, *"--train-data text.txt --eval-iters 1".split()]
    assert pretrain_gpt2.main([*flags, "--save", "a run", "--train-iters", "2"]) == 0
    said, _ = capfd.readouterr()
    assert "  checkpoint  a run/iter_0000002\n" in said.replace("loss curve", "")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ends = []
    for more in (
        ["a run", "--train-iters", "4"],
        ["new", "--train-iters", "2"],
        "other --train-iters 2 --exit-interval 1".split(),
    ):
        resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, limits[1]))  # less than the weights, more than the records
        try:
            code = pretrain_gpt2.main([*flags, "--save", *more])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        said, warned = capfd.readouterr()
        assert code == 1, said
        ends.append((said, warned.strip().splitlines()))
    (said, errors), (said_new, errors_new), (said_stopped, errors_stopped) = ends
    assert "  checkpoint  a run/iter_0000002 (iteration 4 is not saved)\n" in said and "--load 'a run' --save" in said
    assert len(errors) == 1 and re.match(
        r"error: iteration 4 is not saved: a run/iter_0000004\.tmp.*: cannot write "
        r"its [\d,]+ bytes: File too large",
        errors[0],
    ), errors
    assert "  checkpoint  none (iteration 2 is not saved)\n" in said_new and len(errors_new) == 1
    assert not re.search("next:|--load", said_new), said_new
    assert "stopped by --exit-interval at iteration 1: iteration 1 is not saved: the same command begins before it" in (
        said_stopped
    ) and errors_stopped[0].startswith("error: iteration 1 is not saved: other/")
    assert "finished, but iteration 4 is not saved" in (work / "a run/history.jsonl").read_text()


def test_a_run_that_fails_leaves_nothing_in_its_process(
    work: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No thread, no handler of signals, no lock."""
    flags = [
        *FLAGS,
        *"--train-data text.txt --save s --eval-iters 0 --train-iters 2 --async-save".split(),
    ]
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]

    def fail(run: Run) -> None:
        raise error

    monkeypatch.setattr(loop, "train_step", fail)
    for error in (FloatingPointError("the loss is nan"), RuntimeError("a bug"), KeyError("a bug")):
        threads = set(threading.enumerate())
        with contextlib.nullcontext() if isinstance(error, FloatingPointError) else pytest.raises(type(error)):
            assert pretrain_gpt2.main(flags) == 1
        noted = read_incidents("s")[-1]  # by which post_mortem.py names it
        assert noted["kind"] == "error" and noted["text"].startswith(type(error).__name__)
        names = [thread.name for thread in set(threading.enumerate()) - threads if not isinstance(thread, TMonitor)]
        assert names == []
        assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers


def test_a_window_of_skipped_steps_says_so(work: Path, capfd: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    flags = [
        *FLAGS,
        *(
            "--train-data text.txt --save s --eval-iters 1 --train-iters 6 --log-interval 2 --tensorboard-dir events"
        ).split(),
    ]
    assert pretrain_gpt2.main([*flags, *"--precision fp16 --loss-scale 2e9".split()]) == 0
    said, _ = capfd.readouterr()
    assert said.count("| lm loss: skipped | loss scale: 2000000000.0 | grad norm: skipped |") == 3
    assert "number of skipped iterations: 2 |" in said and not re.search(r"\bnan\b|\binf\b", said, re.IGNORECASE)
    assert "WARNING: --precision fp16 on a CPU" in said
    trained = [record for record in metrics(work / "s") if "split" not in record]
    assert [(record["lm_loss"], record["grad_norm"]) for record in trained] == [(None, None)] * 3
    assert "training loss" in (work / "s/report.html").read_text() and any((work / "events").iterdir())


def test_fp16_on_a_cpu_is_auto(work: Path, capfd: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    flags = [*FLAGS, *"--train-data text.txt --save s --eval-iters 0 --train-iters 1 --fp16".split()]
    flags = [word for word in flags if word not in ("--precision", "fp32")]
    assert pretrain_gpt2.main(flags) == 0
    said, _ = capfd.readouterr()
    assert re.search("^notice: --fp16 on a CPU means --precision auto: (bf16|fp32): this CPU has", said, re.MULTILINE)
    assert json.loads((work / "s/config.json").read_text())["precision"] in ("bfloat16", "float32")
