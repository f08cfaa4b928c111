"""Is everything there that a run needs? Started as the training is, with its flags, it says so in seconds:

    python tools/preflight.py --nproc-per-node 2 --model-parallel-size 2 --train-data my_text.txt
    srun python tools/preflight.py --model 345m --data-path corpus_text_document

All ranks compare versions, code, devices, flags, clocks and data; each multiplies numbers whose product is known; each
group tries its collectives; and disk and memory are held against what the run will take. It trains nothing, and leaves
nothing but tokenised text in the cache. Exit codes: 0 where all is well, 1 where something is to be mended, which the
table names, 2 for flags that cannot be.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

import mpu
from data_utils.command_line import Parser
from megatron.gpt2 import device as devices
from megatron.gpt2.config.arguments import Arguments, parse
from megatron.gpt2.dist.ranks import Ranks
from megatron.gpt2.dist.rendezvous import initialize_distributed
from megatron.gpt2.dist.run_program import Log, run_program
from megatron.gpt2.extensions.preflight import alone, together
from megatron.gpt2.extensions.preflight.alone import Facts
from megatron.gpt2.extensions.preflight.checks import Row, code, rows, table, versions
from megatron.gpt2.monitor.environment import ROOT, source_commit
from megatron.gpt2.train.setup import PreparedRun, prepare_run

TIMEOUT_MINUTES = 1.0  # of a collective


def look(arguments: Arguments, ranks: Ranks) -> list[Row]:
    """All checks, the same rows on every rank. Every rank calls it. ValueError where flags ask for a device or a
    backend that is not there."""
    config = arguments.config
    device, _ = devices.choose_device(config.train.device, ranks)
    backend, _ = devices.choose_backend(config.parallel.distributed_backend, device)
    facts = alone.facts_of_process(device)
    if ranks.rank == 0:
        facts["commit"] = source_commit(ROOT)
    # Before the process group: ranks of other versions may not be able to make one.
    found = exchange(ranks, "process", facts)
    if any(row.mend for row in rows_of_process(found)):
        return rows_of_process(found)

    prepared = prepare(arguments, ranks, facts)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        initialize_distributed(ranks, backend, device, TIMEOUT_MINUTES)
    facts["product"] = alone.product_problem(device, prepared.dtype if prepared else torch.float32)
    if ranks.world_size > 1:
        facts["clock"] = together.clock_offset(device)
        tensor, pipeline = config.parallel.model_parallel_size, config.parallel.pipeline_model_parallel_size
        divides = ranks.world_size % (tensor * pipeline) == 0
        state = mpu.initialize_model_parallel(*((tensor, pipeline) if divides else (1, 1)))
        facts["groups"] = together.try_groups(state, device)
    facts |= alone.facts_of_disk(
        Path(str(arguments.checkpoint.save)), first=ranks.rank == 0, writes=ranks.local_rank == 0
    )
    return rows(exchange(ranks, "run", facts))


def rows_of_process(found: Sequence[Facts]) -> list[Row]:
    """The checks of what is known before the process group."""
    hosts = {rank: str(facts["host"]) for rank, facts in enumerate(found)}
    return [*versions(found, hosts), *(row for row in code(found, hosts) if row.name == "code")]


def prepare(arguments: Arguments, ranks: Ranks, facts: Facts) -> PreparedRun | None:
    """Prepare the run as the training does, and put what is known of it, or the problem, into `facts`."""
    try:
        prepared = prepare_run(arguments, ranks, lambda line: None)
        facts |= alone.facts_of_run(prepared, ranks.local_world_size)
        facts |= {"bytes_to_come": alone.bytes_to_come(prepared), "checkpoint_bytes": alone.checkpoint_bytes(prepared)}
    except (ValueError, OSError) as error:
        facts["problem"] = " ".join(str(error).split())
        return None
    return prepared


def exchange(ranks: Ranks, name: str, facts: Facts) -> list[Facts]:
    """The facts of all ranks, by rank: through the store where they have met, else through their process group."""
    if ranks.meeting is not None:
        return [json.loads(text) for text in ranks.meeting.gather(f"preflight {name}", ranks.rank, json.dumps(facts))]
    found = [facts] * ranks.world_size
    if ranks.world_size > 1:
        dist.all_gather_object(found, facts)
    return found


def preflight(words: Sequence[str], ranks: Ranks, log: Log) -> int:
    """Check everything on all ranks and print the table. Returns the exit code."""
    arguments = parse(words)
    devices.set_threads(ranks)
    found = look(arguments, ranks)
    if ranks.rank == 0:
        print("\n".join(table(found)), flush=True)
    exchange(ranks, "end", {})  # nobody leaves before the table is printed: a launcher would end the others
    return 1 if any(row.mend for row in found) else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: this process's); returns the exit code."""
    words = sys.argv[1:] if argv is None else argv
    if "--help" in words or "-h" in words:
        Parser(prog="preflight", usage="preflight [flags of pretrain_gpt2]", description=__doc__).parse_args(["--help"])
    return run_program(preflight, words)
