"""Check in seconds that everything is ready for a run. Start the program like the training, with the same flags:

    python tools/preflight.py --nproc-per-node 2 --tensor-model-parallel-size 2 --train-data my_text.txt
    srun python tools/preflight.py --model 345m --data-path corpus_text_document

All ranks compare versions, code, devices, flags, clocks and data. Each rank multiplies matrices with a known product,
each group tests its collectives, and disk space and memory are compared with the needs of the run. The program trains
nothing, and writes only tokenised text into the cache. Exit codes: 0 if all checks pass, 1 if the table names something
to fix, 2 for bad flags.
"""

import json
import math
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import mpu
from data_utils.command_line import Log, plural, print_help, require
from data_utils.files import flush_to_disk, one_line
from megatron.gpt2 import device as devices
from megatron.gpt2.checkpoint.lease import check_not_in_use
from megatron.gpt2.checkpoint.save_folder import make_save_folder
from megatron.gpt2.commands.bench_collectives import OPERATIONS, run_and_check
from megatron.gpt2.config import ParallelConfig
from megatron.gpt2.config.arguments import Arguments, parse
from megatron.gpt2.device import code_hash
from megatron.gpt2.dist.gathering import gather_rows, gather_strings
from megatron.gpt2.dist.ranks import RankInfo, format_ranks
from megatron.gpt2.dist.rendezvous import initialize_distributed
from megatron.gpt2.dist.run_program import run_program
from megatron.gpt2.extensions.plan.hook import available_memory, describe_failure, memory_inputs, memory_shortage
from megatron.gpt2.extensions.plan.memory import estimate_memory, in_mb
from megatron.gpt2.model.gpt2 import count_parameters
from megatron.gpt2.train.setup import RunContext, build_context, settings_equal_on_all_ranks
from megatron.gpt2.train.start_and_end import repetition_warning

TIMEOUT_MINUTES = 1.0  # the time limit of a collective
# The clocks may differ by at most MAX_CLOCK_SKEW seconds, because the incidents of a failure are sorted by time.
MAX_CLOCK_SKEW = 2.0
CLOCK_ROUNDS = 5
SAME_FILES = "give all machines the same files"
WRITE_TEST_BYTES = 16 << 20  # bytes to write for a measurement of the --save folder's speed
OPTIMIZER_BYTES = 12  # bytes of a parameter: the master and two moments in fp32
PRODUCT_COUNT = 4
INNER_SIZE = 256  # Sums of 256 products of -1, 0 and 1 are exact in every precision.
COLLECTIVES = ("all_reduce_sum", "all_gather", "reduce_scatter", "broadcast")
COLLECTIVE_BYTES = 1 << 18  # the size of a message in bytes, all blocks together
COLLECTIVE_RUNS = 3


class Finding(NamedTuple):
    """The result of a check on one rank. The ranks exchange results as JSON.

    text: the result to show if the check passes.
    problem: shown with the ranks that have the problem.
    is_warning: True for a problem that does not stop a run.
    must_match: values by name; ranks that report no problem must have equal values.
    fix: how to fix a problem or a difference.
    """

    text: str = ""
    fix: str = ""
    problem: str = ""
    must_match: Mapping[str, str] = {}
    is_warning: bool = False


class CheckResult(NamedTuple):
    """A row of the table: the name of a check, its result on all ranks, a way to fix a failure, and whether the check
    passes."""

    name: str
    text: str
    fix: str = ""
    mark: str = "ok"  # "ok", "FIX" or "WARN"


Findings = dict[str, Finding]  # The key is the name of the check.


def combine_findings(name: str, found: Mapping[int, Finding], hosts: Mapping[int, str]) -> list[CheckResult]:
    """Return a row for each problem and each difference of a check, or one row if the check passes.

    found: the result of each rank; ranks that could not run the check are missing.
    """
    by_problem = defaultdict[str, list[int]](list)
    for rank, finding in found.items():
        by_problem[finding.problem].append(rank)
    compared, rows = by_problem.pop("", []), []
    for problem, ranks in by_problem.items():
        prefix = "" if len(ranks) == len(found) else f"{format_ranks(ranks, hosts)}: "
        first = found[ranks[0]]
        rows.append(CheckResult(name, prefix + problem, first.fix, "WARN" if first.is_warning else "FIX"))
    for key in dict.fromkeys(key for rank in compared for key in found[rank].must_match):
        values = {rank: found[rank].must_match.get(key, "none") for rank in compared}
        # If two values are equally frequent, the first rank's value counts as the common one.
        (common, _), *others = Counter(values.values()).most_common()
        for value, _ in others:
            ranks = [rank for rank in compared if values[rank] == value]
            text = f"{key} {value} on {format_ranks(ranks, hosts)}, different from the others"
            rows.append(CheckResult(name, text, found[ranks[0]].fix, "FIX"))
    return rows or [CheckResult(name, found[min(found)].text)]


def run_checks(arguments: Arguments, rank_info: RankInfo) -> list[CheckResult]:
    """Run all checks, on every rank. Return the same rows on every rank. Raises ValueError if the flags name a device
    or a backend that is not available."""
    config = arguments.config
    device, _ = devices.choose_device(config.train.device, rank_info)
    backend, _ = devices.choose_backend(config.parallel.distributed_backend, device)
    context, flags = check_flags(arguments, rank_info)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    problem = product_problem(device, context.dtype if context else torch.float32)
    findings = {
        **check_process(rank_info, device, backend),
        "flags": flags,
        "products": Finding("exact on every rank", "leave that device out: it computes wrong", problem),
        "save folder": check_save_folder(arguments, rank_info, context),
    }
    if context is not None:
        findings |= check_run(context, rank_info)
    rows = exchange_findings(rank_info, "run", findings)
    # Ranks with different versions of torch or different backends may not be able to create a process group.
    if rank_info.world_size > 1 and not any(row.name == "versions" and row.fix for row in rows):
        if not dist.is_initialized():
            initialize_distributed(rank_info, backend, device, TIMEOUT_MINUTES)
        findings = {"clocks": check_clocks(rank_info, device), **check_groups(config.parallel, rank_info, device)}
        rows += exchange_findings(rank_info, "groups", findings)
    return rows


def exchange_findings(rank_info: RankInfo, name: str, own: Findings) -> list[CheckResult]:
    """Exchange the findings of all ranks, and return the rows of the table. The findings go through the rendezvous
    store if there is one, otherwise through the process group."""
    text, rendezvous = json.dumps([platform.node(), own]), rank_info.rendezvous
    texts = rendezvous.gather(f"preflight {name}", rank_info.rank, text) if rendezvous else gather_strings(text)
    hosts, by_check = dict[int, str](), defaultdict[str, dict[int, Finding]](dict)
    for rank, text in enumerate(texts):
        hosts[rank], findings = json.loads(text)
        for check, finding in findings.items():
            by_check[check][rank] = Finding(*finding)
    return [row for check, by_rank in by_check.items() for row in combine_findings(check, by_rank, hosts)]


def check_process(rank_info: RankInfo, device: torch.device, backend: str) -> Findings:
    """Compare library versions, source code and devices."""
    versions, code = devices.library_versions(device), code_hash()[:12]
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    text = ", ".join(f"{name} {version}" for name, version in versions.items())
    install = "install the same versions on every machine; then the groups of ranks are tested, too"
    pace = "use machines of one kind: the slowest device sets the pace of all"
    return {
        "versions": Finding(text, install, must_match={**versions, "backend": backend}),
        "code": Finding(code, "run the same source files on all machines", must_match={"source files": code}),
        "devices": Finding(f"{rank_info.world_size} × {kind}", pace, must_match={"a device": kind}),
    }


def check_flags(arguments: Arguments, rank_info: RankInfo) -> tuple[RunContext | None, Finding]:
    """Prepare the run as the training does. Return None and a problem if the preparation fails."""
    try:
        context = build_context(arguments, rank_info, lambda line: None)
    except (ValueError, OSError) as error:
        return None, Finding(problem=one_line(error), fix="correct the flag or file that the error names")
    iteration = context.resume_metadata.get("iteration", 0)
    start = f"continues iteration {iteration:,}" if iteration else "from random weights"
    finished = ", which is finished: give a larger --train-iters" if context.is_finished else ""
    text = f"{plural(context.train_iters, 'iteration')} in {devices.PRECISIONS[context.dtype]}, {start}{finished}"
    fix = f"start every rank with the same command line, and {SAME_FILES}"
    return context, Finding(text, fix, must_match=settings_equal_on_all_ranks(context))


def product_problem(device: torch.device, dtype: torch.dtype, multiply: Callable[..., Tensor] = torch.matmul) -> str:
    """Describe wrong matrix products of `device`, or return "" if all products are correct.

    A [512, 256] and B [256, 512] have entries -1, 0 and 1, so every entry of A B is exact in every precision. The row
    sums and column sums of A B are compared with sums that the CPU computes from A and B in int64.
    """
    generator = torch.Generator().manual_seed(1)
    shapes = (PRODUCT_COUNT, 512, INNER_SIZE), (PRODUCT_COUNT, INNER_SIZE, 512)
    a, b = (torch.randint(-1, 2, shape, generator=generator) for shape in shapes)
    rows = (a * b.sum(2).unsqueeze(1)).sum(2)  # [products, 512]
    columns = (a.sum(1).unsqueeze(2) * b).sum(1)
    product = multiply(a.to(device, dtype), b.to(device, dtype)).cpu().double()
    wrong = int((product.sum(2) != rows).sum()) + int((product.sum(1) != columns).sum())
    return f"{wrong} row and column sums of {PRODUCT_COUNT} products are wrong" if wrong else ""


def check_clocks(rank_info: RankInfo, device: torch.device) -> Finding:
    """Compare the clocks of all ranks right after a barrier, several times."""
    rounds = []
    for _ in range(CLOCK_ROUNDS):
        dist.barrier()
        rounds.append(gather_rows(torch.tensor([time.time()], dtype=torch.float64, device=device))[:, 0])
    # [rounds, ranks]: the seconds by which the clock of each rank is ahead of rank 0's clock
    times = torch.stack(rounds)
    offsets = (times - times[:, :1]).median(0).values
    own = float(offsets[rank_info.rank] - offsets.median())
    way = "ahead of" if own > 0 else "behind"
    problem = f"that clock is {abs(own):.1f} s {way} most others" if abs(own) > MAX_CLOCK_SKEW else ""
    apart = float(offsets.max() - offsets.min())
    return Finding(f"within {apart:.3f} s", "set its clock (chrony, ntpd)", problem)


def check_groups(config: ParallelConfig, rank_info: RankInfo, device: torch.device) -> Findings:
    """Test the collectives of each group that has more than one member. The printed times are those of the slowest
    rank."""
    sizes = config.tensor_model_parallel_size, config.pipeline_model_parallel_size
    state = mpu.initialize_model_parallel(*(sizes if rank_info.world_size % math.prod(sizes) == 0 else (1, 1)))
    groups = {
        "world": dist.group.WORLD,
        "tensor": state.tensor_model_parallel_group,
        "data": state.data_parallel_group,
        "pipeline": state.pipeline_model_parallel_group,
    }
    findings = {}
    for name, group in groups.items():
        if group is None or group.size() == 1:
            continue
        medians, wrong = list[float](), list[str]()
        for collective in COLLECTIVES:
            operation = OPERATIONS[collective]
            runs = [
                run_and_check(operation, group, COLLECTIVE_BYTES, device, torch.float32) for _ in range(COLLECTIVE_RUNS)
            ]
            medians.append(statistics.median(seconds for _, _, seconds, _ in runs))
            if not all(right for *_, right in runs):
                wrong.append(collective)
        slowest = gather_rows(torch.tensor(medians, device=device)).amax(0).tolist()
        text = ", ".join(f"{c} {1000 * s:.2f} ms" for c, s in zip(COLLECTIVES, slowest, strict=True))
        fix = "a link or a device is faulty: tools/bench_collectives.py shows details"
        findings[f"{name} group"] = Finding(text, fix, f"{', '.join(wrong)} gave wrong values" if wrong else "")
    return findings


def check_save_folder(arguments: Arguments, rank_info: RankInfo, context: RunContext | None) -> Finding:
    """Check that the --save folder is writable, not in use by another run, and has space for all checkpoints.

    The first rank of each machine also measures the write speed, with a temporary file of WRITE_TEST_BYTES."""
    folder = Path(str(arguments.checkpoint.save))
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        if rank_info.rank == 0 and folder.is_dir():
            make_save_folder(folder)
            check_not_in_use(folder)
        writable = existing.is_dir() and os.access(existing, os.W_OK)
        require(writable, f"--save {folder}: {existing} cannot be written")
        needed, free = checkpoint_bytes(context) if context else 0, shutil.disk_usage(existing).free
        text = f"{needed / 1e9:,.3f} GB needed, {free / 1e9:,.3f} GB free"
        if needed > free:
            return Finding(problem=text, fix="free space, or keep fewer checkpoints: --keep-last")
        if rank_info.local_rank == 0:
            random_bytes, start = os.urandom(WRITE_TEST_BYTES), time.perf_counter()
            with tempfile.TemporaryFile(dir=existing) as file:
                file.write(random_bytes)
                flush_to_disk(file)
            text += f", {WRITE_TEST_BYTES / 1e6 / (time.perf_counter() - start):.0f} MB/s"
        return Finding(text)
    except (ValueError, OSError) as error:
        return Finding(problem=one_line(error), fix="make it writable, or give a different --save")


def checkpoint_bytes(context: RunContext) -> int:
    """Return the size in bytes of all checkpoints that the run keeps, without the JSON files."""
    config = context.config.checkpoint
    bytes_each = context.dtype.itemsize + (0 if config.no_save_optim else OPTIMIZER_BYTES)
    steps = max(0, context.train_iters - context.resume_metadata.get("iteration", 0))
    saves = math.ceil(steps / config.save_interval) if config.save_interval else 1
    if config.keep_last is not None:
        saves = min(saves, config.keep_last + 1)  # A new checkpoint is written before the oldest one is deleted.
    return count_parameters(context.config.model)[0] * bytes_each * (saves + 2 * config.keep_best)


def check_run(context: RunContext, rank_info: RankInfo) -> Findings:
    """Check that all ranks read the same data, how often each sample is used, and that the run fits into memory."""
    start, samples, batch = context.resume_metadata, len(context.splits.train), context.batch_schedule.final
    steps = context.train_iters - start.get("iteration", 0)
    used = context.batch_schedule.samples_after_steps(steps, start.get("consumed_samples", 0))
    count, epochs = plural(samples, "sample"), used / max(samples, 1)
    problem, _, fix = repetition_warning(epochs, context.config.data).partition("; ")
    if samples < batch:
        problem = f"{count}, fewer than a batch of {batch:,}"
        fix = "use more text, a smaller --global-batch-size or a shorter --seq-length"
    length = f"{count}, the run uses {used:,}: each {epochs:.2f} times"
    available, limit = available_memory(context.device, rank_info.local_world_size)
    try:
        total = in_mb(estimate_memory(memory_inputs(context)).total)
        short, _, changes = memory_shortage(context, rank_info.local_world_size).partition(": ")
        memory = f"{total} MB of {in_mb(available)} MB ({limit})"
    except Exception as error:
        memory, short, changes = describe_failure(error), "", ""
    fingerprint, held_out = context.splits.fingerprint[:12], context.splits.held_out_fingerprint[:12]
    contents = {"training data": fingerprint, "validation and test files": held_out}
    return {
        "data": Finding(f"{fingerprint} on every rank", SAME_FILES, must_match=contents),
        "length": Finding(length, fix, problem, is_warning=samples >= batch),
        "memory": Finding(memory, changes, short),
    }


def result_table(rows: Sequence[CheckResult]) -> Iterator[str]:
    """Yield an aligned line for each check. Below a failed check, yield a line that says how to fix the failure."""
    width = max(len(row.name) for row in rows)
    for row in rows:
        yield f"  {row.name:<{width}}  {row.mark:<4}  {row.text}"
        if row.fix:
            yield f"  {'':<{width}}        {row.fix}"


def preflight(words: Sequence[str], rank_info: RankInfo, log: Log) -> int:
    """Run all checks on all ranks, and print the table on rank 0. Return the exit code."""
    arguments = parse(words)
    devices.set_threads(rank_info)
    rows = run_checks(arguments, rank_info)
    if rank_info.rank == 0:
        print("\n".join(result_table(rows)), flush=True)
    # All ranks wait for the table, because a launcher ends all ranks when one rank exits.
    exchange_findings(rank_info, "end", {})
    return 1 if any(row.mark == "FIX" for row in rows) else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: sys.argv[1:]). Return the exit code."""
    words = sys.argv[1:] if argv is None else argv
    print_help("preflight", words, __doc__)
    return run_program(preflight, words)
