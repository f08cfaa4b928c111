"""A run of some steps that is recorded, or compared with a trace. Every rank calls these functions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megatron.gpt2.device import PRECISIONS
from megatron.gpt2.training.run import Run
from megatron.gpt2.verification.capture import Capture
from megatron.gpt2.verification.compare import Comparer
from megatron.gpt2.verification.rounding import Rounding
from megatron.gpt2.verification.trace import Trace, TraceWriter


def facts(run: Run) -> dict[str, Any]:
    """What a trace says of its run, as JSON: what must be the same in a run that is compared with it, and where it was
    made."""
    prepared, parallel = run.prepared, run.parallel
    return {"config": prepared.config.as_dict(), "model_parallel_size": parallel.model_parallel_size,
            "data_parallel_size": parallel.data_parallel_size, "global_batch_size": prepared.global_batch_size,
            "micro_batches": prepared.micro_batches, "iteration": run.progress.iteration,
            "data_fingerprint": prepared.splits.fingerprint, "tokenizer": prepared.tokenizer.fingerprint,
            "precision": PRECISIONS[prepared.dtype], "device": str(prepared.device.type), "torch": torch.__version__,
            "threads": torch.get_num_threads()}


def record(run: Run, steps: int, folder: Path) -> None:
    """Run `steps` steps, and leave what this rank has of them in `folder`, for `trace.merge`."""
    writer = TraceWriter(folder, run.parallel.rank)
    _observe(run, steps, writer)
    writer.finish()


def compare(run: Run, steps: int, trace: Trace, folder: Path) -> None:
    """Run `steps` steps, and leave in `folder` how far this rank's part of them is from `trace`."""
    comparer = Comparer(trace, Rounding(trace, run.prepared.dtype), folder, run.parallel.rank)
    _observe(run, steps, comparer)
    comparer.finish()


def _observe(run: Run, steps: int, take: Any) -> None:
    run.engine.model.train()
    capture = Capture(run, take)
    try:
        for _ in range(steps):
            capture.step()
    finally:
        capture.close()
