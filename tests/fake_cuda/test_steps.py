"""Whole steps in every mode: nothing waits for the device, and nothing is on the wrong one."""

from __future__ import annotations

import collections
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.modes import DROPOUT, MODES
from megatron.gpt2 import device as devices
from megatron.gpt2.checkpoint import state, writer
from megatron.gpt2.train.evaluate import SAMPLING, evaluate_and_log, sample_text
from megatron.gpt2.train.loop import train
from tests.fake_cuda.fake_gpu import FakeGPU
from tests.fake_cuda.program import OFFLOAD, check_budget, check_step, running, steps


@pytest.mark.parametrize("mode", MODES)
def test_a_step_waits_for_nothing_and_keeps_to_its_budget(text: Path, tmp_path: Path, mode: str):
    with running(text, tmp_path, MODES[mode]) as (run, gpu):
        check_step(run, gpu, OFFLOAD if mode == "offload" else ())
        check_budget(mode, gpu)


def test_training_waits_at_log_lines_alone(text: Path, tmp_path: Path):
    """Ten iterations with a log line after every fifth, an evaluation and a sample after the last."""
    with running(text, tmp_path, ["--train-iters", "10", "--log-interval", "5", "--eval-interval", "100"]) as (
        run,
        gpu,
    ):
        steps(run, gpu)
        gpu.clear()
        assert train(run) == ""
        assert gpu.waits
        assert {wait.split(":")[0] for wait in gpu.waits} <= {
            "megatron/gpt2/train/loop.py",
            "megatron/gpt2/train/evaluate.py",
        }


def test_an_evaluation_waits_once_for_its_sums(text: Path, tmp_path: Path):
    with running(text, tmp_path) as (run, gpu):
        gpu.clear()
        evaluate_and_log(run, "valid")
        assert gpu.kernels and gpu.faults == []
        assert len({wait.split(" ")[0] for wait in gpu.waits}) == 2, gpu.waits  # lengths in bytes, and the sums


def test_generation_waits_once_for_each_token(text: Path, tmp_path: Path):
    with running(text, tmp_path) as (run, gpu):
        gpu.clear()
        sample_text(run)
        assert gpu.kernels and gpu.faults == []
        reads = [wait for wait in gpu.waits if "reads" in wait or "cuda to cpu" in wait]
        assert len(reads) == SAMPLING.max_new_tokens, collections.Counter(reads)


def test_the_peak_is_measured_with_numbers_that_differ():
    with FakeGPU() as gpu:
        devices._measured_gemm(torch.device("cuda", 0), torch.bfloat16, seconds=0.01)
    assert {"arange", "sin", "mm"} <= {kernel.name for kernel in gpu.kernels}


def test_save_and_load(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Into files and back, the tensors of every kind; what arrives on the host is 0."""
    for module in (writer, state):  # one file at a time: tensors without data know no threads
        monkeypatch.setattr(module, "in_threads", lambda work, items, *_: [work(item) for item in items])
    with running(text, tmp_path, DROPOUT) as (run, gpu):
        steps(run, gpu)
        run.progress.step(run.samples_of_step)
        assert run.save() is not None
    with running(text, tmp_path, DROPOUT) as (run, gpu):
        assert run.progress.iteration == 1
        check_step(run, gpu)
