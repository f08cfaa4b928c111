"""Is everything there that a run needs? Started as the training is, with its flags, it says so in seconds:

    python tools/preflight.py --nproc-per-node 2 --model-parallel-size 2 --train-data my_text.txt
    srun python tools/preflight.py --model 345m --data-path corpus_text_document

All ranks compare versions, code, devices, flags, clocks and data; each multiplies numbers whose product is known; each
group tries its collectives; and disk and memory are held against what the run will take. It trains nothing, and leaves
nothing but tokenised text in the cache. Exit codes: 0 if all is well, 1 if something is to be fixed, which the table
names, 2 for flags that cannot be.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import mpu
from data_utils.command_line import Parser
from megatron.gpt2 import device as devices
from megatron.gpt2.config.arguments import Arguments, parse
from megatron.gpt2.dist.ranks import Ranks, named
from megatron.gpt2.dist.rendezvous import initialize_distributed
from megatron.gpt2.dist.run_program import Log, run_program
from megatron.gpt2.extensions.preflight import facts
from megatron.gpt2.extensions.preflight.facts import Facts
from megatron.gpt2.monitor.environment import ROOT, source_commit
from megatron.gpt2.train.setup import PreparedRun, prepare_run

TIMEOUT_MINUTES = 1.0  # of a collective
CLOCKS = 2.0  # seconds that clocks may be apart: what ranks note of a death is put in order by their clocks
SLOW_SAVE = 600.0  # seconds
SAME_FILES = "let all machines see the same files"


class Row(NamedTuple):
    """A check: its name, what was found, and how to fix it; "" if it is well."""

    name: str
    text: str
    fix: str = ""


def row(name: str, well: str, wrong: str | None, fix: str) -> Row:
    """wrong: what was found if it is not well, else empty."""
    return Row(name, wrong, fix) if wrong else Row(name, well)


class Found(list[Facts]):
    """The facts of all ranks, by rank."""

    def names(self, ranks: Sequence[int]) -> str:
        """These ranks with their hosts."""
        return named(ranks, {rank: str(one["host"]) for rank, one in enumerate(self)})

    def odd(self, key: str, inner: str | None = None) -> tuple[str, Any] | None:
        """The ranks that have another value than most, or than rank 0 if no value has most, and the value of the first
        of them; None if all have the same. inner: a key of the dictionary that is the value of `key`."""
        values = [one.get(key) if inner is None else one[key].get(inner) for one in self]
        common = max(values, key=lambda value: (values.count(value), value == values[0]))
        ranks = [rank for rank, value in enumerate(values) if value != common]
        return (self.names(ranks), values[ranks[0]]) if ranks else None

    def said(self, key: str) -> str:
        """The ranks with a text under `key`, and that of the first; "" if none has one."""
        ranks = [rank for rank, one in enumerate(self) if one.get(key)]
        return f"{self.names(ranks)}: {self[ranks[0]][key]}" if ranks else ""

    def process_rows(self) -> Iterator[Row]:
        """The checks of what is known before there is a process group."""
        first = self[0]
        text, fix = ", ".join(f"{name} {version}" for name, version in first["versions"].items() if version), ""
        for name in reversed(first["versions"]):
            if odd := self.odd("versions", name):
                text, fix = f"{name} {odd[1]} on {odd[0]}", f"install the same {name} on every machine"
        yield Row("versions", text, fix)
        wrong = (odd := self.odd("code")) and f"{odd[0]} run other source files"
        well = f"{first['code'][:12]}, {first.get('commit', '')}".rstrip(", ")
        yield row("code", well, wrong, "let all machines run the same files")

    def run_rows(self) -> Iterator[Row]:
        """The checks of the devices, the groups and the run, in the order of the table."""
        wrong = (odd := self.odd("device")) and f"{odd[1]} on {odd[0]}"
        fix = "take machines of one kind: the slowest device sets the pace of all"
        yield row("devices", f"{len(self)} × {self[0]['device']}", wrong, fix)
        yield self._flags()
        fix = "leave that device out: it computes wrong"
        yield row("products", "exact on every rank", self.said("product"), fix)
        if len(self) > 1:
            yield self._clocks()
        yield from self._groups()
        yield self._disk()
        if any("data" not in one for one in self):  # a rank could not prepare the run
            return
        yield self._data()
        who, _, short = self.said("memory_problem").partition(": ")
        text, _, ways = short.partition(": ")
        yield Row("memory", f"{who}: {text}" if short else self[0]["memory"], ways)

    def _flags(self) -> Row:
        """Whether each rank could prepare the run, and decided as the others did."""
        if text := self.said("problem"):
            return Row("flags", text, "fix what it names")
        first = self[0]
        for name in first["decisions"]:
            if odd := self.odd("decisions", name):
                fix = f"start every rank with the same command line, and {SAME_FILES}"
                return Row("flags", f"{odd[0]} have another {name}: {odd[1]}", fix)
        start = f"continues iteration {first['start']:,}" if first["start"] else "from random weights"
        finished = ", which is finished: give a greater --train-iters" if first["is_finished"] else ""
        return Row("flags", f"{first['train_iters']:,} iterations in {first['precision']}, {start}{finished}")

    def _clocks(self) -> Row:
        offsets = [one.get("clock", 0.0) for one in self]
        apart, middle = max(offsets) - min(offsets), sorted(offsets)[(len(offsets) - 1) // 2]
        if apart <= CLOCKS:
            return Row("clocks", f"within {max(apart, 0.001):.3f} s")
        worst = max(range(len(self)), key=lambda rank: abs(offsets[rank] - middle))
        side = "before" if offsets[worst] > middle else "behind"
        text = f"that of {self.names([worst])} is {abs(offsets[worst] - middle):.1f} s {side} most"
        return Row("clocks", text, "set its clock (chrony, ntpd)")

    def _groups(self) -> Iterator[Row]:
        for name in dict.fromkeys(group for one in self for group in one.get("groups", {})):
            of_ranks = {rank: one["groups"][name] for rank, one in enumerate(self) if name in one.get("groups", {})}
            if wrong := [rank for rank, one in of_ranks.items() if one["wrong"]]:
                text = f"{', '.join(of_ranks[wrong[0]]['wrong'])} gave wrong values on {self.names(wrong)}"
                fix = "tools/bench_collectives.py says more: a link or a device is faulty"
            else:
                slowest = {op: max(one["ms"][op] for one in of_ranks.values()) for op in of_ranks[min(of_ranks)]["ms"]}
                text, fix = ", ".join(f"{op} {ms:.2f} ms" for op, ms in slowest.items()), ""
            yield Row(f"{name} group", text, fix)

    def _disk(self) -> Row:
        if text := self.said("disk_problem"):
            return Row("save folder", text, "make it writable, or give another --save")
        free, speeds = min(one["free"] for one in self), [one["bytes_per_s"] for one in self if one["bytes_per_s"]]
        wanted, one = self[0].get("bytes_to_come", 0), self[0].get("checkpoint_bytes", 0)
        text = f"{_size(wanted)} to come, {_size(free)} free, {min(speeds) / 1e6:.0f} MB/s"
        seconds = one / len(speeds) / min(speeds)
        if wanted > free:
            return Row("save folder", text, f"make room, or keep fewer: --keep-last (a checkpoint has {_size(one)})")
        if seconds > SLOW_SAVE:
            fix = "take a faster disk, or --async-save and a greater --save-interval"
            return Row("save folder", f"{text}: a save takes {seconds:,.0f} s", fix)
        return Row("save folder", text)

    def _data(self) -> Row:
        """Whether all ranks read the same, and how often each sample comes."""
        if odd := self.odd("data"):
            return Row(
                "data", f"{odd[0]} read other training data", SAME_FILES.replace("all machines", "every machine")
            )
        samples, used, batch = self[0]["samples"], self[0]["used"], self[0]["batch"]
        if samples < batch:
            fix = "take more text, a smaller --global-batch-size or a shorter --seq-length"
            return Row("data", f"{samples:,} samples, fewer than a batch of {batch:,}", fix)
        times = f"each {used / max(samples, 1):.2f} times"
        return Row("data", f"{samples:,} samples, of which the run takes {used:,}: {times}")


def _size(count: float) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"


def look(arguments: Arguments, ranks: Ranks) -> list[Row]:
    """All checks, the same rows on every rank. Every rank calls it. ValueError if flags ask for a device or a backend
    that is not there."""
    config = arguments.config
    device, _ = devices.choose_device(config.train.device, ranks)
    backend, _ = devices.choose_backend(config.parallel.distributed_backend, device)
    own = facts.facts_of_process(device)
    if ranks.rank == 0:
        own["commit"] = source_commit(ROOT)
    # Before the process group: ranks of other versions may not be able to make one.
    process = [*exchange(ranks, "process", own).process_rows()]
    if any(row.fix for row in process):
        return process

    prepared = prepare(arguments, ranks, own)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        initialize_distributed(ranks, backend, device, TIMEOUT_MINUTES)
    own["product"] = facts.product_problem(device, prepared.dtype if prepared else torch.float32)
    if ranks.world_size > 1:
        own["clock"] = facts.clock_offset(device)
        tensor, pipeline = config.parallel.model_parallel_size, config.parallel.pipeline_model_parallel_size
        divides = ranks.world_size % (tensor * pipeline) == 0
        state = mpu.initialize_model_parallel(*((tensor, pipeline) if divides else (1, 1)))
        own["groups"] = facts.try_groups(state, device)
    save = Path(str(arguments.checkpoint.save))
    own |= facts.facts_of_disk(save, first=ranks.rank == 0, writes=ranks.local_rank == 0)
    return [*process, *exchange(ranks, "run", own).run_rows()]


def prepare(arguments: Arguments, ranks: Ranks, own: Facts) -> PreparedRun | None:
    """Prepare the run as the training does, and put what is known of it, or the problem, into `own`."""
    try:
        prepared = prepare_run(arguments, ranks, lambda line: None)
        own |= facts.facts_of_run(prepared, ranks.local_world_size)
    except (ValueError, OSError) as error:
        own["problem"] = " ".join(str(error).split())
        return None
    return prepared


def exchange(ranks: Ranks, name: str, own: Facts) -> Found:
    """The facts of all ranks, by rank: through the store if they have met, else through their process group."""
    if ranks.meeting is not None:
        return Found(
            json.loads(text) for text in ranks.meeting.gather(f"preflight {name}", ranks.rank, json.dumps(own))
        )
    found = [own] * ranks.world_size
    if ranks.world_size > 1:
        dist.all_gather_object(found, own)
    return Found(found)


def table(rows: Sequence[Row]) -> list[str]:
    """One line for each check, which line up, and below each that is not well how to fix it."""
    width = max(len(row.name) for row in rows)
    lines = []
    for row in rows:
        lines.append(f"  {row.name:<{width}}  {'FIX' if row.fix else 'ok':<3}  {row.text}")
        if row.fix:
            lines.append(f"  {'':<{width}}       {row.fix}")
    return lines


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
