"""Is everything there that a run needs? Started as the training is, with its flags, it says so in seconds:

    python tools/preflight.py --nproc-per-node 2 --model-parallel-size 2 --train-data my_text.txt
    srun python tools/preflight.py --model 345m --data-path corpus_text_document

All ranks compare versions, code, devices, flags, clocks and data; each multiplies numbers whose product is known; each
group tries its collectives; and disk and memory are held against what the run will take. It trains nothing, and leaves
nothing but tokenised text in the cache. Exit codes: 0 if all is well, 1 if something is to be fixed, which the table
names, 2 for flags that cannot be.
"""

import functools
import hashlib
import json
import math
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import mpu
from data_utils.command_line import ROOT, Parser
from data_utils.files import flush_to_disk
from megatron.gpt2 import device as devices
from megatron.gpt2.checkpoint.folder import lock_folder
from megatron.gpt2.commands.bench_collectives import OPERATIONS, Members, correct, prepare, time_run
from megatron.gpt2.config import ParallelConfig
from megatron.gpt2.config.arguments import Arguments, parse
from megatron.gpt2.dist.gathering import gather_rows, gather_texts
from megatron.gpt2.dist.ranks import Ranks, named
from megatron.gpt2.dist.rendezvous import initialize_distributed
from megatron.gpt2.dist.run_program import Log, run_program
from megatron.gpt2.extensions.plan.hook import available, setting_of, shortage
from megatron.gpt2.extensions.plan.step import expected, in_mb
from megatron.gpt2.model.gpt2 import count_parameters
from megatron.gpt2.train.setup import PreparedRun, decisions, prepare_run

TIMEOUT_MINUTES = 1.0  # of a collective
CLOCKS = 2.0  # seconds that clocks may be apart: what ranks note of a death is put in order by their clocks
CLOCK_ROUNDS = 5
SLOW_SAVE = 600.0  # seconds
SAME_FILES = "let all machines see the same files"
ROOMS = ("mpu", "data_utils", "megatron/gpt2")
WRITTEN = 16 << 20  # bytes, for the speed of the --save folder
MOMENTS = 12  # bytes of a parameter: master and two moments in fp32
PRODUCTS = 4
INNER = 256  # of the product: sums of so many -1, 0 and 1 are exact in every precision
COLLECTIVES = ("all_reduce_sum", "all_gather", "reduce_scatter", "broadcast")
COLLECTIVE_BYTES = 1 << 18  # of a message, or of all its blocks together
COLLECTIVE_RUNS = 3


class Finding(NamedTuple):
    """What a rank finds out by a check. The ranks exchange it as JSON.

    text: is shown if all is well. problem: is shown with the ranks that have one. alike: has to be the same on all
    ranks, by name. fix: how to fix a problem or a difference.
    """

    text: str = ""
    fix: str = ""
    problem: str = ""
    alike: Mapping[str, str] = {}


class Row(NamedTuple):
    """A line of the table: a check, what was found, and how to fix it; "" if it is well."""

    name: str
    text: str
    fix: str = ""


Findings = dict[str, Finding]  # by the name of the check


def judge(name: str, found: Mapping[int, Finding], hosts: Mapping[int, str]) -> Row:
    """Return the row of a check. found: by rank, of those that could make it."""
    problems = {rank: finding for rank, finding in found.items() if finding.problem}
    for finding in problems.values():
        is_common = all(other.problem == finding.problem for other in found.values())
        return Row(name, finding.problem if is_common else f"{named(problems, hosts)}: {finding.problem}", finding.fix)
    first = found[min(found)]
    for key in first.alike:
        values = {rank: finding.alike.get(key, "none") for rank, finding in found.items()}
        # What most ranks have, or rank 0 if nothing has most.
        common = max(values.values(), key=lambda value: (list(values.values()).count(value), value == first.alike[key]))
        if odd := [rank for rank, value in values.items() if value != common]:
            return Row(name, f"{key} {values[odd[0]]} on {named(odd, hosts)}, unlike the others", first.fix)
    return Row(name, first.text)


def look(arguments: Arguments, ranks: Ranks) -> list[Row]:
    """Make all checks; returns the same rows on every rank. Every rank calls it. ValueError if flags ask for a device
    or a backend that is not there."""
    config = arguments.config
    device, _ = devices.choose_device(config.train.device, ranks)
    backend, _ = devices.choose_backend(config.parallel.distributed_backend, device)
    # Before the process group: ranks of other versions may not be able to make one.
    rows = exchange(ranks, "process", check_process(ranks, device))
    if any(row.fix for row in rows):
        return rows
    prepared, flags = check_flags(arguments, ranks)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        initialize_distributed(ranks, backend, device, TIMEOUT_MINUTES)
    problem = product_problem(device, prepared.dtype if prepared else torch.float32)
    findings = {
        "flags": flags,
        "products": Finding("exact on every rank", "leave that device out: it computes wrong", problem),
    }
    if ranks.world_size > 1:
        findings |= {"clocks": check_clocks(ranks, device), **check_groups(config.parallel, ranks, device)}
    findings["save folder"] = check_disk(arguments, ranks, prepared)
    if prepared is not None:
        findings |= check_run(prepared, ranks)
    return [*rows, *exchange(ranks, "run", findings)]


def exchange(ranks: Ranks, name: str, own: Findings) -> list[Row]:
    """Tell each other what all ranks have found, through the store if they have met, else through their process group.
    Returns the rows."""
    text = json.dumps([platform.node(), own])
    texts = ranks.meeting.gather(f"preflight {name}", ranks.rank, text) if ranks.meeting else gather_texts(text)
    found = {rank: json.loads(text) for rank, text in enumerate(texts)}
    hosts = {rank: host for rank, (host, _) in found.items()}
    names = max((list(findings) for _, findings in found.values()), key=len, default=[])
    return [
        judge(name, {rank: Finding(*all_[name]) for rank, (_, all_) in found.items() if name in all_}, hosts)
        for name in names
    ]


def check_process(ranks: Ranks, device: torch.device) -> Findings:
    """Versions, code and device."""
    versions, code = devices.versions(device), code_hash()[:12]
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    commit = f", {devices.source_commit()}" if ranks.rank == 0 else ""
    text = ", ".join(f"{name} {version}" for name, version in versions.items())
    pace = "take machines of one kind: the slowest device sets the pace of all"
    return {
        "versions": Finding(text, "install the same version on every machine", alike=versions),
        "code": Finding(code + commit, "let all machines run the same files", alike={"source files": code}),
        "devices": Finding(f"{ranks.world_size} × {kind}", pace, alike={"a device": kind}),
    }


def code_hash() -> str:
    """Hash all source files of the program."""
    digest = hashlib.sha256()
    for path in (path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))):
        digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def check_flags(arguments: Arguments, ranks: Ranks) -> tuple[PreparedRun | None, Finding]:
    """Prepare the run as the training does. Returns None for a run that cannot be."""
    try:
        prepared = prepare_run(arguments, ranks, lambda line: None)
    except (ValueError, OSError) as error:
        return None, Finding(problem=" ".join(str(error).split()), fix="fix what it names")
    iteration = prepared.start.get("iteration", 0)
    start = f"continues iteration {iteration:,}" if iteration else "from random weights"
    finished = ", which is finished: give a greater --train-iters" if prepared.is_finished else ""
    text = f"{prepared.train_iters:,} iterations in {devices.PRECISIONS[prepared.dtype]}, {start}{finished}"
    fix = f"start every rank with the same command line, and {SAME_FILES}"
    return prepared, Finding(text, fix, alike=decisions(prepared))


def product_problem(device: torch.device, dtype: torch.dtype, multiply: Callable[..., Tensor] = torch.matmul) -> str:
    """Say what is wrong with products of this device; "" if each one has the row and column sums that whole numbers
    give.

    A [512, 256] and B [256, 512] hold -1, 0 and 1, so that every entry of A B is exact in every precision. The sums of
    A B over a row and over a column follow from A and B by vectors only, computed on the CPU in int64.
    """
    generator = torch.Generator().manual_seed(1)
    for number in range(PRODUCTS):
        a, b = (torch.randint(-1, 2, shape, generator=generator) for shape in ((512, INNER), (INNER, 512)))
        rows = (a * b.sum(1)).sum(1)  # [512]
        columns = (a.sum(0)[:, None] * b).sum(0)  # [512]
        product = multiply(a.to(device, dtype), b.to(device, dtype)).cpu().double()
        wrong = int((product.sum(1) != rows).sum()) + int((product.sum(0) != columns).sum())
        if wrong:
            return f"product {number + 1} of {PRODUCTS} has {wrong} of 1,024 row and column sums wrong"
    return ""


def check_clocks(ranks: Ranks, device: torch.device) -> Finding:
    """Compare the clocks of all ranks behind some barriers."""
    rounds = []
    for _ in range(CLOCK_ROUNDS):
        dist.barrier()
        rounds.append(gather_rows(torch.tensor([time.time()], dtype=torch.float64, device=device))[:, 0])
    times = torch.stack(rounds)  # [rounds, ranks]
    offsets = (times - times[:, :1]).median(0).values  # seconds by which each is before rank 0
    own = float(offsets[ranks.rank] - offsets.median())
    problem = f"that clock is {abs(own):.1f} s {'before' if own > 0 else 'behind'} most" if abs(own) > CLOCKS else ""
    apart = max(float(offsets.max() - offsets.min()), 0.001)
    return Finding(f"within {apart:.3f} s", "set its clock (chrony, ntpd)", problem)


def check_groups(config: ParallelConfig, ranks: Ranks, device: torch.device) -> Findings:
    """Try the collectives of each group that has more than one member. The times are those of the slowest rank."""
    sizes = config.model_parallel_size, config.pipeline_model_parallel_size
    state = mpu.initialize_model_parallel(*(sizes if ranks.world_size % math.prod(sizes) == 0 else (1, 1)))
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
        members, medians, wrong = Members(group, device, torch.float32), list[float](), list[str]()
        for collective in COLLECTIVES:
            operation, seconds, right = OPERATIONS[collective], list[float](), True
            for _ in range(COLLECTIVE_RUNS):
                x, y = prepare(operation, members, COLLECTIVE_BYTES)
                seconds.append(time_run(functools.partial(operation.run, members, x, y), device, group))
                right &= correct(operation, members, y)
            medians.append(statistics.median(seconds))
            wrong += [] if right else [collective.removesuffix("_sum")]
        slowest = gather_rows(torch.tensor(medians, device=device)).amax(0).tolist()
        times = [f"{c.removesuffix('_sum')} {1000 * s:.2f} ms" for c, s in zip(COLLECTIVES, slowest, strict=True)]
        problem = f"{', '.join(wrong)} gave wrong values" if wrong else ""
        fix = "tools/bench_collectives.py says more: a link or a device is faulty"
        findings[f"{name} group"] = Finding(", ".join(times), fix, problem)
    return findings


def check_disk(arguments: Arguments, ranks: Ranks, prepared: PreparedRun | None) -> Finding:
    """Check that the --save folder can be written, that rank 0 could take it, and that it has room for what is to come;
    on the first rank of each machine, how fast it takes WRITTEN bytes. Nothing stays on the disk."""
    folder = Path(str(arguments.checkpoint.save))
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    one, count = checkpoint_bytes(prepared) if prepared is not None else (0, 0)
    try:
        if ranks.rank == 0 and (folder / "lock").exists():
            lock_folder(folder, lambda line: None).close()
        if not there.is_dir() or not os.access(there, os.W_OK):
            raise ValueError(f"--save {folder}: {there} cannot be written")
        free = shutil.disk_usage(there).free
        text = f"{_size(count * one)} to come, {_size(free)} free"
        if count * one > free:
            fix = f"make room, or keep fewer: --keep-last (a checkpoint has {_size(one)})"
            return Finding(problem=text, fix=fix)
        if ranks.local_rank == 0:
            data, start = os.urandom(1 << 20), time.perf_counter()
            with tempfile.TemporaryFile(dir=there) as file:
                for _ in range(WRITTEN >> 20):
                    file.write(data)
                flush_to_disk(file)
            speed = WRITTEN / max(time.perf_counter() - start, 1e-9)
            text += f", {speed / 1e6:.0f} MB/s"
            seconds = one / speed * ranks.local_world_size / ranks.world_size  # each machine writes its part
            if seconds > SLOW_SAVE:
                fix = "take a faster disk, or --async-save and a greater --save-interval"
                return Finding(problem=f"{text}: a save takes {seconds:,.0f} s", fix=fix)
        return Finding(text)
    except (ValueError, OSError) as error:
        return Finding(problem=" ".join(str(error).split()), fix="make it writable, or give another --save")


def _size(count: float) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"


def checkpoint_bytes(prepared: PreparedRun) -> tuple[int, int]:
    """Bytes of a checkpoint, all ranks' files without the JSON, and the most checkpoints that the run keeps at once."""
    config = prepared.config.checkpoint
    bytes_each = prepared.dtype.itemsize + (0 if config.no_save_optim else MOMENTS)
    steps = max(0, prepared.train_iters - prepared.start.get("iteration", 0))
    saves = math.ceil(steps / config.save_interval) if config.save_interval else 1
    if config.keep_last is not None:
        saves = min(saves, config.keep_last + 1)  # one is written before an old one goes
    return count_parameters(prepared.config.model)[0] * bytes_each, saves + 2 * config.keep_best


def check_run(prepared: PreparedRun, ranks: Ranks) -> Findings:
    """Whether all ranks read the same text, how often the run takes each sample, and whether it fits into the memory."""
    start, samples, batch = prepared.start, len(prepared.splits.train), prepared.batch_schedule.final
    steps = prepared.train_iters - start.get("iteration", 0)
    used = prepared.batch_schedule.after_steps(steps, start.get("consumed_samples", 0))
    text = f"{samples:,} samples, of which the run takes {used:,}: each {used / max(samples, 1):.2f} times"
    problem, fix = "", SAME_FILES
    if samples < batch:
        problem = f"{samples:,} samples, fewer than a batch of {batch:,}"
        fix = "take more text, a smaller --global-batch-size or a shorter --seq-length"
    there, where = available(prepared.device, ranks.local_world_size)
    memory = f"{in_mb(expected(setting_of(prepared)).total)} MB of {in_mb(there)} MB ({where})"
    short, _, ways = shortage(prepared, ranks.local_world_size).partition(": ")
    return {
        "data": Finding(text, fix, problem, {"training data": prepared.splits.fingerprint[:12]}),
        "memory": Finding(memory, ways, short),
    }


def table(rows: Sequence[Row]) -> Iterator[str]:
    """One line for each check, which line up, and below each that is not well how to fix it."""
    width = max(len(row.name) for row in rows)
    for row in rows:
        yield f"  {row.name:<{width}}  {'FIX' if row.fix else 'ok':<3}  {row.text}"
        if row.fix:
            yield f"  {'':<{width}}       {row.fix}"


def preflight(words: Sequence[str], ranks: Ranks, log: Log) -> int:
    """Check everything on all ranks and print the table. Returns the exit code."""
    arguments = parse(words)
    devices.set_threads(ranks)
    rows = look(arguments, ranks)
    if ranks.rank == 0:
        print("\n".join(table(rows)), flush=True)
    exchange(ranks, "end", {})  # nobody leaves before the table is printed: a launcher would end the others
    return 1 if any(row.fix for row in rows) else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: this process's); returns the exit code."""
    words = sys.argv[1:] if argv is None else argv
    if "--help" in words or "-h" in words:
        Parser(prog="preflight", usage="preflight [flags of pretrain_gpt2]", description=__doc__).parse_args(["--help"])
    return run_program(preflight, words)
