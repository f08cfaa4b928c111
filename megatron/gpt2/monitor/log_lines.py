"""Functions that format the text that a run prints: tables, log lines in Megatron's format and the final report."""

import math
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch

from data_utils.command_line import align_columns

WIDTH = 100  # The width of the lines around tables, in characters.
RULE = "-" * WIDTH
SHOWN_LOSSES = 6
UNIGRAM = "unigram entropy of the tokens"  # the baseline that every trained model should beat

Rows = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class IterationRecord:
    """The numbers of a log line, which metrics.jsonl stores. Means are over the iterations since the last log line."""

    iteration: int
    consumed_samples: int
    lm_loss: float | None  # The mean loss in nats per token, without skipped steps. None if all steps were skipped.
    learning_rate: float
    loss_scale: float
    grad_norm: float | None  # The gradient norm of the last step, before clipping. None if this step was skipped.
    ms_per_iteration: float
    tokens_per_second: float  # The sum over all ranks.
    mfu: float  # The fraction of the peak FLOP/s of all devices.
    memory_bytes: int | None = None  # The result of `peak_memory` on rank 0.


@dataclass(frozen=True)
class EvaluationRecord:
    """The loss of one split ("valid" or "test") at one iteration."""

    iteration: int
    split: str
    lm_loss: float  # nats per token
    bits_per_byte: float | None = None

    @property
    def ppl(self) -> float:
        """The perplexity, exp(loss)."""
        return perplexity(self.lm_loss)


@dataclass(frozen=True)
class TaskRecord:
    """The score of a task at one iteration.

    split: the name of the task.
    """

    iteration: int
    split: str
    accuracy: float
    accuracy_norm: float | None = None  # the accuracy if answers are ranked by their log-likelihood per character


def perplexity(nats: float) -> float:
    """Return exp of a mean loss in nats, or inf if exp overflows."""
    return math.exp(nats) if nats < 700 else math.inf  # math.exp overflows above 709.


def align_rows(rows: Rows) -> list[str]:
    """Return lines of `name   value` with aligned values."""
    return [f"  {line}" for line in align_columns(rows, "<<")]


def start_table(rows: Rows, flags: Rows) -> str:
    """Return the table at the start of a run.

    rows: (name, value).
    flags: (flag, value) of the flags that differ from their defaults."""
    lines = [RULE, *align_rows(rows), RULE]
    if flags:
        lines += ["  flags that differ from their defaults:", *align_rows(flags), RULE]
    return "\n".join(lines)


def iteration_line(record: IterationRecord, *, train_iters: int, seconds_to_go: float, skipped: int = 0) -> str:
    """Return the log line of an iteration in Megatron's format.

    skipped: the number of skipped steps since the last log line.
    """
    loss = "skipped" if record.lm_loss is None else f"{record.lm_loss:.6E}"
    norm = "skipped" if record.grad_norm is None else f"{record.grad_norm:.3f}"
    parts = [
        f"iteration {record.iteration:8d}/{train_iters:8d}",
        f"elapsed time per iteration (ms): {record.ms_per_iteration:.1f}",
        f"learning rate: {record.learning_rate:.3E}",
        f"lm loss: {loss}",
        f"loss scale: {record.loss_scale:.1f}",
        f"grad norm: {norm}",
        f"tokens/s: {record.tokens_per_second:,.0f}",
        f"MFU: {record.mfu:.1%}",
        f"time to go: {timedelta(seconds=round(seconds_to_go))}",
        f"number of skipped iterations: {skipped}" if skipped else "",
    ]
    return " | ".join(filter(None, parts)) + " |"


def evaluation_line(record: EvaluationRecord, *, final: bool = False) -> str:
    """Return the framed line of an evaluation in Megatron's format.

    final: whether the evaluation follows the last step.
    """
    data = {"valid": "val"}.get(record.split, record.split)
    where = f"the end of training for {data} data" if final else f"iteration {record.iteration}"
    line = f"validation loss at {where} | LM loss: {record.lm_loss:.6E} | LM PPL: {record.ppl:.6E}"
    if record.bits_per_byte is not None:
        line += f" | bits per byte: {record.bits_per_byte:.4f}"
    frame = "-" * len(line)
    return f"{frame}\n{line}\n{frame}"


def memory_line(device: torch.device, expected: int | None = None) -> str:
    """Return a line with the memory of this rank in MB (2^20 bytes): that of the GPU's allocator, or `resident_memory`
    on a CPU.

    expected: the expected peak in bytes.
    """
    sizes = {} if expected is None else {"expected at the peak": expected}
    if device.type == "cuda":
        sizes["allocated"] = torch.cuda.memory_allocated(device)
        sizes["max allocated"] = torch.cuda.max_memory_allocated(device)
        sizes["reserved"] = torch.cuda.memory_reserved(device)
    else:
        sizes |= resident_memory()
    return " | ".join(["memory (MB)", *(f"{name}: {size / 2**20:,.1f}" for name, size in sizes.items())])


def resident_memory() -> dict[str, int]:
    """Return the current and peak memory of this process in bytes, under "resident" and "peak resident".

    Pages of files (libraries, memory-mapped data) are not counted, because the system can drop them and read them
    again. Linux reports only the peak of all pages, so "peak resident" is this peak minus the pages of files that are
    resident now.
    """
    status = Path("/proc/self/status")
    if status.exists():
        fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
        resident, peak, of_files = (
            1024 * int(fields.get(name, "0 kB").split()[0]) for name in ("VmRSS", "VmHWM", "RssFile")
        )
        return {"resident": resident - of_files, "peak resident": peak - of_files}
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"peak resident": peak if sys.platform == "darwin" else 1024 * peak}  # macOS counts bytes.


def peak_memory(device: torch.device) -> int:
    """Return the peak memory of this rank in bytes: that of the GPU's allocator, or `resident_memory` on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else resident_memory()["peak resident"]


def closing_report(
    *,
    validation_losses: Mapping[int, float | None],
    bits_per_byte: float | None,
    baselines: Mapping[str, float | None],
    sample: str,
    checkpoint: str,
    plot: str,
    next_commands: Rows,
) -> str:
    """Return the report at the end of a run: losses, baselines, text samples, paths of files and commands to run next.

    validation_losses: {iteration: loss, or None if it is not finite}.
    bits_per_byte: the model's bits per byte on the validation split; None without an evaluation.
    baselines: {description: bits per byte, or None if they were not computed}.
    plot: the path of the image of the loss curve, the curve as text, or "".
    next_commands: (description, command).
    """
    scores = {"this model": bits_per_byte, **baselines}
    losses = [f"{math.nan if loss is None else loss:.3f} at {at}" for at, loss in validation_losses.items()][
        -SHOWN_LOSSES:
    ]
    lines = [RULE, *([f"validation loss: {', '.join(losses)}", ""] if losses else [])]
    lines.append("validation, bits per byte (less is better):")
    lines += align_rows([(name, "not computed" if bits is None else f"{bits:.3f}") for name, bits in scores.items()])
    lines += ["", "samples: the model continues the words in brackets:"]
    for line in sample.splitlines():
        lines += textwrap.wrap(line, WIDTH, initial_indent="  ", subsequent_indent="  ") or [""]
    lines.append("")
    paths = [("checkpoint", checkpoint)]
    if "\n" in plot:
        lines += [*plot.splitlines(), ""]
    elif plot:
        paths.append(("loss curve", plot))
    lines += align_rows(paths)
    lines += ["", "next:"]
    for what, command in next_commands:
        lines += [f"  # {what}", f"  {command}"]
    return "\n".join([*lines, RULE])
