"""Test runs from the command line: their output, the files in the --save folder, and how a run continues and ends.
After bad input, one of two ranks prints one line that names the flag or file, and both ranks exit with code 2."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import re
import resource
import shlex
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
from tqdm import TMonitor

from megatron.gpt2.commands import pretrain_gpt2
from megatron.gpt2.monitor.incidents import read_incidents
from megatron.gpt2.train import loop
from megatron.gpt2.train.train_step import train_step
from megatron.gpt2.train.trainer import Trainer
from tests.conftest import ROOT
from tests.distributed import run_ranks
from tests.fork_server import WarmPython
from tests.megatron.gpt2.train.training_runs import write_text

# The flags give runs of a few seconds.
SHORT = (
    "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 16 "
    "--max-position-embeddings 16 --tokenizer-type bytes --micro-batch-size 4 --lr 1e-3 --device cpu "
    "--precision fp32 --split 80,10,10"
)
FLAGS = SHORT.split()
TEXT = f"{SHORT} --train-data text.txt"
Train = Callable[..., tuple[str, str]]


@pytest.fixture
def train(work: Path, capfd: pytest.CaptureFixture[str]) -> Train:
    """Return a function that runs a command line and returns its stdout and stderr."""

    def run(line: str, code: int = 0) -> tuple[str, str]:
        capfd.readouterr()
        assert pretrain_gpt2.main(shlex.split(line)) == code
        return capfd.readouterr()

    return run


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_from_beginning_to_end_and_on(work: Path, train: Train):
    """The text has fewer samples than the steps read, and fewer than --eval-iters asks for."""
    write_text(work, 150)
    flags = f"{TEXT} --save runs/a --log-interval 4 --eval-interval 6 --eval-iters 1000"
    said, warned = train(f"{flags} --train-iters 10")
    assert "arn" not in warned, warned  # No library prints a warning.
    # All 14 steps, with those of the continued run below, read 4 samples each.
    assert int(re.search(r"train: [\d,]+ tokens, (\d+) samples", said)[1]) < 14 * 4
    assert re.search(
        r"^iteration        4/      10 \| elapsed time per iteration \(ms\): [\d.]+ \| learning rate: "
        r"\d\.\d{3}E-\d\d \| lm loss: \d\.\d{6}E\+00 \| loss scale: 1\.0 \| grad norm: [\d.]+ \| "
        r"tokens/s: [\d,]+ \| MFU: [\d.]+% \| time to go: 0:00:\d\d \|$",
        said,
        re.MULTILINE,
    )
    assert re.search(
        r"^time \(ms\) \| forward: [\d.]+ \| backward: [\d.]+ \| allreduce: [\d.]+ \| optimizer: [\d.]+ "
        r"\| batch generator: [\d.]+ \| data loader: [\d.]+",
        said,
        re.MULTILINE,
    )
    assert said.count("memory (MB)") == 1
    for line in (
        "padded vocab (size: 257) with 127 dummy tokens (new size: 384)",
        "FLOPs per token",
        "--hidden-size",
        "validation loss at iteration 6",
        "validation loss at the end of training for val data | LM loss:",
        "at the end of training for test data",
        "xz -9",
        "next:",
    ):
        assert line in said, line
    named = re.findall(r"\S+\.(?:sh|py)\b", said.partition("next:")[2])
    assert len(named) >= 3 and all((work / path).resolve().is_file() for path in named)

    folder = work / "runs/a"
    assert (folder / "latest_checkpointed_iteration.txt").read_text().strip() == "10"
    assert (folder / "iter_0000010/mp_rank_00/model.safetensors").is_file()
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    records = metrics(folder)
    trained = [r for r in records if "split" not in r]
    assert [r["iteration"] for r in trained] == [4, 8, 10] and trained[-1]["consumed_samples"] == 40
    evaluated = [r for r in records if "split" in r]
    assert [(r["split"], r["iteration"]) for r in evaluated] == [("valid", 6), ("valid", 10), ("test", 10)]
    last = evaluated[1]
    assert last["ppl"] == pytest.approx(math.exp(last["lm_loss"]))
    # Each token is one byte, except the end-of-document token, which has no bytes.
    assert last["bits_per_byte"] == pytest.approx(last["lm_loss"] / math.log(2), rel=0.01)

    # The same command again prints that the run is finished. --load with a larger --train-iters continues the run.
    said, _ = train(f"{flags} --train-iters 10")
    assert "runs/a is finished" in said and "iteration " not in said.replace("at iteration", "")
    said, _ = train("--load runs/a --train-iters 14 --log-interval 2")
    assert "continuing runs/a/iter_0000010" in said
    assert (folder / "latest_checkpointed_iteration.txt").read_text().strip() == "14"
    assert [r["iteration"] for r in metrics(folder) if "split" not in r] == [4, 8, 10, 12, 14]

    _, warned = train("--load runs/a --train-iters 20 --hidden-size 64", code=2)
    assert warned.startswith("error: --hidden-size: here 64, checkpoint 32: ")

    # Fine-tuning saves into a new folder. The same command then continues the run in this folder.
    finetune = f"{flags} --finetune --load runs/a --save runs/b --train-iters 3"
    said, _ = train(finetune)
    assert "weights from runs/a/iter_0000014" in said and (work / "runs/b/iter_0000003").is_dir()
    assert "runs/b is finished" in train(finetune)[0]

    said, _ = train("--load runs/a --save runs/d --train-iters 14")
    assert (
        "runs/a is finished: it is at iteration 14 of 14. Give a greater --train-iters to continue, or --finetune "
        "--load runs/a and a new --save to start a new run from its weights."
    ) in said
    assert not (work / "runs/d").exists()

    # A run with --load runs/a and --save runs/c that was stopped continues from runs/c.
    moved = "--load runs/a --save runs/c --train-iters 20"
    train(f"{moved} --exit-interval 16")
    assert "continuing runs/c/iter_0000016" in train(moved)[0]


def test_a_missing_load_folder_is_one_warning(work: Path, train: Train):
    flags = f"{TEXT} --save new --load new --eval-iters 0"
    assert train(f"{flags} --train-iters 2")[0].count("WARNING: --load new holds no checkpoint") == 1
    assert "continuing new/iter_0000002" in train(f"{flags} --train-iters 3")[0]
    train(f"{SHORT} --load nowhere --save nowhere --exit-on-missing-checkpoint", code=2)
    _, mistyped = train(f"{SHORT} --load nowhere --save elsewhere", code=2)
    assert "--load nowhere holds no checkpoint" in mistyped and not (work / "elsewhere").exists()


def test_no_save_and_no_load_of_optimizer_and_random_states(work: Path, train: Train):
    flags = f"{TEXT} --save s --eval-iters 0 --attention-dropout 0.1 --dropout-rng torch"
    train(f"{flags} --train-iters 2 --no-save-optim --no-save-rng")
    assert [p.name for p in (work / "s/iter_0000002/mp_rank_00").iterdir()] == ["model.safetensors"]
    said, _ = train(f"{flags} --train-iters 4")
    assert "holds no optimizer" in said and "random streams start from a new seed" in said
    assert "holds no optimizer" not in train(f"{flags} --train-iters 6 --no-load-optim --no-load-rng")[0]
    files = {p.name.partition(".")[0] for p in (work / "s/iter_0000006/mp_rank_00").iterdir()}
    assert files == {"exp_avg_dp_00", "exp_avg_sq_dp_00", "master_dp_00", "model", "rng_dp_00"}


def test_a_tokenizer_that_the_run_trains(train: Train):
    base = TEXT.replace("--tokenizer-type bytes", "--save sp --train-iters 1 --eval-iters 0")
    said, _ = train(f"{base} --tokenizer-type SentencePieceTokenizer --tokenizer-vocab-size 300")
    assert "SentencePieceTokenizer, 300 ids" in said
    train(f"{base} --train-iters 2")  # The run loads the tokenizer from its --save folder.


def test_a_stop_in_the_last_step_leaves_the_end_as_it_is(
    work: Path, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a stop is requested in its last step, a run still evaluates and prints its report, and exits with code 0."""

    def with_sigterm(trainer: Trainer) -> None:
        train_step(trainer)
        if trainer.progress.iteration == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    for name, more in (("interval", "--exit-interval 2"), ("sigterm", "")):
        if name == "sigterm":
            monkeypatch.setattr(loop, "train_step", with_sigterm)
        said, _ = train(f"{TEXT} --eval-iters 1 --train-iters 2 --save {name} {more}")
        assert "stopped" not in said and "the end of training for test data" in said and "next:" in said
        assert f"{name}/iter_0000002\n" in said and (work / name / "iter_0000002").is_dir()


def test_a_disk_that_fills_at_the_last_save(work: Path, train: Train) -> None:
    """If the disk is full at the last save, the report names the last saved checkpoint, and the error is one line."""
    said, _ = train(f"{TEXT} --eval-iters 1 --save 'a run' --train-iters 2")
    assert "  checkpoint  a run/iter_0000002\n" in said.replace("loss curve", "")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Limit files to 40,000 bytes: enough for the log files, but not for the weights.
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, limits[1]))
    try:
        said, error = train(f"{TEXT} --eval-iters 1 --save 'a run' --train-iters 4", code=1)
        stopped, _ = train(f"{TEXT} --save new --train-iters 2 --exit-interval 1", code=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "  checkpoint  a run/iter_0000002 (iteration 4 is not saved)\n" in said and "--load 'a run' --save" in said
    assert re.fullmatch(
        r"error: iteration 4 is not saved: a run/iter_0000004\.tmp.*: cannot write its [\d,]+ bytes: File too .*\n",
        error,
    ), error
    assert "at iteration 1: the same command continues from an earlier checkpoint" in stopped
    assert "finished, but iteration 4 is not saved" in (work / "a run/history.jsonl").read_text()


def test_a_run_that_fails_leaves_nothing_in_its_process(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed run leaves no threads and no signal handlers in its process, and writes the error into incidents/."""
    flags = f"{TEXT} --save s --eval-iters 0 --train-iters 2 --async-save".split()
    handlers, threads = signal.getsignal(signal.SIGTERM), set(threading.enumerate())
    for error in (FloatingPointError("the loss is nan"), RuntimeError("a bug")):
        monkeypatch.setattr(loop, "train_step", mock.Mock(side_effect=error))
        with contextlib.nullcontext() if isinstance(error, FloatingPointError) else pytest.raises(RuntimeError):
            assert pretrain_gpt2.main(flags) == 1
        noted = read_incidents("s")[-1]  # post_mortem.py prints this name.
        assert noted["kind"] == "error" and noted["text"].startswith(type(error).__name__)
        left = [thread for thread in set(threading.enumerate()) - threads if not isinstance(thread, TMonitor)]
        assert left == [] and signal.getsignal(signal.SIGTERM) == handlers


def test_a_window_of_skipped_steps_says_so(work: Path, train: Train) -> None:
    said, _ = train(
        f"{TEXT} --save s --eval-iters 1 --train-iters 6 --log-interval 2 --tensorboard-dir events --precision fp16 "
        "--loss-scale 2e9"
    )
    assert said.count("| lm loss: skipped | loss scale: 2000000000.0 | grad norm: skipped |") == 3
    assert "number of skipped iterations: 2 |" in said and not re.search(r"\bnan\b|\binf\b", said, re.IGNORECASE)
    assert "WARNING: --precision fp16 on a CPU" in said
    trained = [record for record in metrics(work / "s") if "split" not in record]
    assert [(record["lm_loss"], record["grad_norm"]) for record in trained] == [(None, None)] * 3
    assert "training loss" in (work / "s/report.html").read_text() and any((work / "events").iterdir())


# {flags: pattern of the error line}. {folder} is the folder of the test.
CASES = {
    "--seq-length 32": "--seq-length 32 is longer than --max-position-embeddings 16",
    "--train-data {folder}/nowhere.jsonl": r"--train-data.*nowhere\.jsonl",
    "--train-data {folder}/empty.txt": r"empty\.txt",
    "--train-data {folder}/short.txt --split 98,1,1": "--split 98,1,1",
    "--load {folder}/lost": r"lost.*latest_checkpointed_iteration\.txt|latest_checkpointed.*lost",
    "--model-parallel-size 3 --num-attention-heads 3 --hidden-size 12 --ffn-hidden-size 12": (
        "--tensor-model-parallel-size 3 needs a multiple of 3 ranks, and this run has 2"
    ),
    "--micro-batch-size 3 --global-batch-size 8": "--global-batch-size 8 .*3 × 2",
    "--finetune --load {folder}/nothing --save {folder}/x": "--load .*nothing",
}


def run_cases(rank: int, world_size: int, folder: Path) -> dict[str, tuple[int, str]]:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        XDG_CACHE_HOME=f"{folder}/cache",
    )
    from megatron.gpt2.commands import pretrain_gpt2
    from megatron.gpt2.dist import run_program

    run_program.LAUNCHER_GRACE = run_program.SILENT_GRACE = 0.0
    results = {}
    for number, flags in enumerate(CASES):
        place = ["--init-method", f"file://{folder}/ranks meet here, {number}"]
        words = [*f"{SHORT} --save {folder}/save {flags}".format(folder=folder).split(), *place]
        with contextlib.redirect_stderr(io.StringIO()) as said:
            code = pretrain_gpt2.main(words)
        results[flags] = code, said.getvalue()
    return results


def test_bad_input(tmp_path: Path):
    write_text(tmp_path)
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "short.txt").write_text("abcdef")
    (tmp_path / "lost").mkdir()
    (tmp_path / "lost" / "latest_checkpointed_iteration.txt").write_text("300\n")
    first, second = run_ranks(run_cases, 2, tmp_path)
    for name, expected in CASES.items():
        code, said = first[name]
        assert code == 2 and second[name] == (2, ""), (name, code, said, second[name])
        assert said.startswith("error: ") and said.count("\n") == 1, (name, said)
        assert re.search(expected, said), (name, said)
    assert not (tmp_path / "save").exists(), "a refused run left something behind"


def test_torchrun_reports_exit_code_2_of_each_worker(python: WarmPython, tmp_path: Path):
    """Rank 0 prints the error, also if it starts after the other rank has ended."""
    (tmp_path / "late.py").write_text(
        "import os, runpy, time\ntime.sleep(4 * (os.environ['RANK'] == '0'))\n"
        "runpy.run_module('megatron.pretrain_gpt2', run_name='__main__')\n"
    )
    words = "-m torch.distributed.run --standalone --nproc-per-node 2 late.py --hidden-sise 3".split()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [python.python, *words], cwd=tmp_path, env=environment, text=True, capture_output=True, timeout=240
    )
    assert done.returncode != 0
    said = done.stderr
    ours = [line for line in said.splitlines() if line.startswith("error")]
    assert ours == ["error: unknown flag --hidden-sise: did you mean --hidden-size?"], said
    assert said.index(ours[0]) < said.index("ChildFailedError")
    # torchrun lists one or both ranks, with exit code 2 and not with the number of a signal.
    assert set(re.findall(r"exitcode\s*: (-?\d+)", said)) == {"2"}, said
