"""The text that a run prints: tables, log lines in Megatron's form and the closing report.

`megatron/gpt2/monitor/run_log.py` prints it and keeps the records.
"""

import math
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch

WIDTH = 100  # of the rules around tables and evaluations
RULE = "-" * WIDTH
UNIGRAM = "unigram entropy of the tokens"  # a baseline that any model should beat

Rows = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class IterationRecord:
    """One logged iteration, a line of metrics.jsonl; means are over the iterations since the last log."""

    iteration: int
    consumed_samples: int
    lm_loss: float | None  # nats per token, mean over the steps that were not skipped; None if all were
    learning_rate: float
    loss_scale: float
    grad_norm: float | None  # of the last step, before clipping; None if that was skipped
    ms_per_iteration: float  # mean
    tokens_per_second: float  # of all ranks together
    mfu: float | None  # fraction of the devices' peak; None if the peak is not known
    memory_bytes: int | None = None  # this rank's peak, see `peak_memory`


@dataclass(frozen=True)
class EvaluationRecord:
    """The loss of one split ("valid" or "test") at one iteration."""

    iteration: int
    split: str
    lm_loss: float  # nats per token
    bits_per_byte: float | None = None

    @property
    def ppl(self) -> float:
        """The perplexity: e to the power of the loss."""
        return perplexity(self.lm_loss)


def perplexity(nats: float) -> float:
    """exp of a mean loss in nats per token or word, inf if no float holds it."""
    return math.exp(nats) if nats < 700 else math.inf  # exp overflows a float at 710


def aligned(rows: Rows) -> list[str]:
    """Lines of `name   value`, with the values below one another."""
    width = max((len(name) for name, _ in rows), default=0)
    return [f"  {name:<{width}}  {value}" for name, value in rows]


def start_table(rows: Rows, flags: Rows) -> str:
    """The table at the start of a run: (name, value) of its `rows`, then every flag that differs from its default."""
    lines = [RULE, *aligned(rows), RULE]
    if flags:
        lines += ["  flags that differ from their defaults:", *aligned(flags), RULE]
    return "\n".join(lines)


def iteration_line(record: IterationRecord, *, train_iters: int, seconds_to_go: float, skipped: int = 0) -> str:
    """Megatron's line of one logged iteration.

    skipped: steps since the last such line that were skipped because of an overflow.
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
        "" if record.mfu is None else f"MFU: {record.mfu:.1%}",
        f"time to go: {timedelta(seconds=round(seconds_to_go))}",
        f"number of skipped iterations: {skipped}" if skipped else "",
    ]
    return " | ".join(filter(None, parts)) + " |"


def evaluation_line(record: EvaluationRecord, *, final: bool = False) -> str:
    """Megatron's framed line of an evaluation. final: whether it is the one at the end of training."""
    data = {"valid": "val"}.get(record.split, record.split)
    where = f"the end of training for {data} data" if final else f"iteration {record.iteration}"
    line = f"validation loss at {where} | LM loss: {record.lm_loss:.6E} | LM PPL: {record.ppl:.6E}"
    if record.bits_per_byte is not None:
        line += f" | bits per byte: {record.bits_per_byte:.4f}"
    frame = "-" * len(line)
    return f"{frame}\n{line}\n{frame}"


def memory_line(device: torch.device, expected: int | None = None) -> str:
    """This rank's memory in MB (2^20 bytes): the allocator's on a GPU, on a CPU what `resident_memory` counts.

    expected: bytes that were expected at the peak, which the line begins with.
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
    """ "resident" and "peak resident": bytes of this process, now and at most so far, as far as the system has them,
    without the pages of files (libraries, memory-mapped data).

    The system can drop such pages and read them again, and counts them for a process once it has touched them: a
    forked rank starts with few. Linux keeps no peak of the others only, so "peak resident" is the peak of all pages
    less the pages of files that are resident now.
    """
    status = Path("/proc/self/status")
    if status.exists():
        fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
        resident, peak, of_files = (
            1024 * int(fields.get(name, "0 kB").split()[0]) for name in ("VmRSS", "VmHWM", "RssFile")
        )
        return {"resident": resident - of_files, "peak resident": peak - of_files}
    import resource  # not on Windows, hence here

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"peak resident": peak if sys.platform == "darwin" else 1024 * peak}  # macOS counts bytes


def peak_memory(device: torch.device) -> int:
    """Bytes of this rank's peak so far: of the allocator on a GPU, on a CPU as `resident_memory` counts."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else resident_memory()["peak resident"]


def closing_report(
    *,
    bits_per_byte: float | None,
    baselines: Mapping[str, float | None],
    sample: str,
    checkpoint: str,
    plot: str,
    next_commands: Rows,
) -> str:
    """The end of a run: the model compared with its baselines, a sample, where the files are and what to run next.

    bits_per_byte: of the model on the validation split, None without an evaluation. baselines: description to bits per
    byte, None if it was not computed. plot: the path of the PNG, a text curve, or "". next_commands: (what it does,
    command).
    """
    scores = {"this model": bits_per_byte, **baselines}
    lines = [RULE, "validation, bits per byte (less is better):"]
    lines += aligned([(name, "not computed" if bits is None else f"{bits:.3f}") for name, bits in scores.items()])
    unigram = baselines.get(UNIGRAM)
    if bits_per_byte is not None and unigram is not None and bits_per_byte >= unigram:
        lines.append("  It knows no more than how often each token comes: give it more --train-iters or a higher --lr.")
    lines += ["", "a sample: from held-out text the words in brackets, from the model the rest:"]
    for line in sample.splitlines():
        lines += textwrap.wrap(line, WIDTH, initial_indent="  ", subsequent_indent="  ") or [""]
    lines.append("")
    paths = [("checkpoint", checkpoint)]
    if "\n" in plot:
        lines += [*plot.splitlines(), ""]
    elif plot:
        paths.append(("loss curve", plot))
    lines += aligned(paths)
    if next_commands:
        lines += ["", "next:"]
    for what, command in next_commands:
        lines += [f"  # {what}", f"  {command}"]
    return "\n".join([*lines, RULE])
