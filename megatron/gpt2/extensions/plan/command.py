"""Parameters and memory of one rank of a training run, by part, without starting or allocating it:

    python tools/plan.py --model 345m --device cuda                           # any flags of pretrain_gpt2.py
    python tools/plan.py --model 1.5b --device cuda --ranks 8 --memory-gb 40  # what fits 40 GB (of 2^30 bytes) per rank
    python tools/plan.py --model 345m --recompute-granularity full --accounting megatron-2019
    python tools/plan.py --model 1.5b --device cuda --pipeline-model-parallel-size 4   # a row for each stage
    python tools/plan.py --model 345m --json

--device cuda plans for a GPU on any machine, in bf16 unless a precision is given. The parts are explained in
docs/explanation/memory.md.
Exit codes: 0; 1 where no layout fits --memory-gb; 2 for bad input.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from data_utils import build_tokenizer, default_tokenizer_kind
from data_utils.command_line import Parser, program
from megatron.gpt2 import device as devices
from megatron.gpt2.checkpoint.folder import find_checkpoint
from megatron.gpt2.checkpoint.source import decay_iters
from megatron.gpt2.config import Config, require
from megatron.gpt2.config.arguments import Arguments, merge_checkpoint, parse
from megatron.gpt2.config.flags import launch_flags
from megatron.gpt2.extensions.plan import megatron_2019
from megatron.gpt2.extensions.plan.fit import Candidate, cheapest, cost, largest_micro_batch, smallest
from megatron.gpt2.extensions.plan.pipelines import bubble
from megatron.gpt2.extensions.plan.report import in_mb
from megatron.gpt2.extensions.plan.sizes import Setting, Sizes
from megatron.gpt2.extensions.plan.step import CUDA_CONTEXT, Memory, expected, of_stages
from megatron.gpt2.model.parameters import count_parameters
from megatron.gpt2.monitor.reporting import aligned, resident_memory

GPT2_VOCABULARY = 50257
GB = 2**30


def options(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """The flags of this program, and the words that are left for training's parser. ValueError where one cannot be."""
    parser = Parser(
        description=__doc__,
        usage="%(prog)s [flags of pretrain_gpt2.py] [--ranks N] [--memory-gb X] [--accounting NAME] [--json]",
    )
    parser.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help="ranks of the run (default: --world-size, --nproc-per-node, or those of one model)",
    )
    parser.add_argument(
        "--memory-gb", type=float, metavar="X", help="memory per rank, in GB of 2^30 bytes: print what fits into it"
    )
    parser.add_argument(
        "--accounting",
        choices=("this", "megatron-2019"),
        default="this",
        help="whose memory to count: this program's, or that of Megatron-LM's first release in fp16 on a GPU",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, with sizes in bytes")
    chosen, rest = parser.parse_known_args(argv)
    require(chosen.ranks is None or chosen.ranks >= 1, f"--ranks must be positive, not {chosen.ranks}")
    require(chosen.memory_gb is None or chosen.memory_gb > 0, f"--memory-gb must be positive, not {chosen.memory_gb}")
    if chosen.memory_gb is not None and chosen.accounting != "this":
        raise ValueError("--memory-gb looks for layouts of this program: leave --accounting out")
    return chosen, rest


def configuration(words: Sequence[str]) -> Config:
    """The run that the flags mean, with the shape of the checkpoint that it would continue and the vocabulary's size;
    no text is read."""
    arguments = parse(words)
    where = arguments.checkpoint
    checkpoint = find_checkpoint(where.load or str(where.save), log=lambda line: None, verify=False)
    if checkpoint is not None and "config" in checkpoint.facts:
        arguments = merge_checkpoint(arguments, checkpoint.facts["config"], decay_iters(checkpoint.facts))
    config = arguments.config
    size = config.model.vocab_size or (checkpoint.facts["vocab_size"] if checkpoint else vocabulary(arguments))
    return dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=size))


def vocabulary(arguments: Arguments) -> int:
    """The tokenizer's size, as far as it is known before there is any text."""
    data = arguments.config.data
    kind = data.tokenizer_type or default_tokenizer_kind()
    if kind == "GPT2BPETokenizer" and not (data.vocab_file and Path(data.vocab_file).exists()):
        return GPT2_VOCABULARY
    if kind == "SentencePieceTokenizer" and not (data.tokenizer_model and Path(data.tokenizer_model).exists()):
        return data.tokenizer_vocab_size
    return build_tokenizer(
        kind,
        vocab_file=data.vocab_file,
        merge_file=data.merge_file,
        cache_dir=data.cache_dir,
        model_file=data.tokenizer_model,
    ).vocab_size


def setting(config: Config, ranks: int) -> Setting:
    """On the device that the flags name, whether or not this machine has it."""
    train = config.train
    device = train.device if train.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and train.precision == "auto" and not torch.cuda.is_available():
        dtype = torch.bfloat16
    else:
        dtype, _ = devices.choose_precision(train.precision, torch.device(device))
    # This process has loaded what a run has before there is a model.
    fixed = CUDA_CONTEXT if device == "cuda" else resident_memory().get("resident", 0)
    return Setting(config, ranks, device, dtype, fixed, bool(devices.set_allocator(torch.device(device))))


def facts(config: Config, plan: Setting | None, memory: Memory) -> dict[str, Any]:
    """All that is known, in numbers."""
    model, train, p = config.model, config.train, config.parallel.model_parallel_size
    total = count_parameters(model, p)[0]
    # In 2019 the vocabulary was padded in another way.
    own = max(Sizes(plan, stage).parameters for stage in range(plan.stages)) if plan else memory.parts["weights"] // 2
    found: dict[str, Any] = {
        "parameters": {
            "in_all": total,
            "of_a_rank": own,
            "matrices_12lh2": megatron_2019.layer_matrices(model.num_layers, model.hidden_size),
        },
        "memory": {**memory.parts, "total": memory.total, "moment": memory.moment, "on_host": memory.on_host},
    }
    if plan is None:
        kept = megatron_2019.layer_activations(
            s=config.data.seq_length, b=train.micro_batch_size, h=model.hidden_size, n=model.num_attention_heads, p=p
        )
        return found | {
            "megatron_2019": {
                "from_step_to_step": sum(memory.parts[part] for part in ("weights", "gradients", "optimizer")),
                "matrices_at_20_bytes": megatron_2019.BYTES_PER_PARAMETER * found["parameters"]["matrices_12lh2"],
                "activations_without_recompute": model.num_layers * kept,
            }
        }
    found |= {
        "ranks": plan.world_size,
        "data_parallel": plan.data_parallel_size,
        "device": plan.device,
        "precision": devices.PRECISIONS[plan.dtype],
    }
    return found if plan.stages == 1 else found | {"pipeline": pipeline_facts(plan)}


def pipeline_facts(plan: Setting) -> dict[str, Any]:
    """The schedule, the share of a step in which it lets ranks wait, and what each stage holds."""
    stages = []
    for stage, memory in enumerate(of_stages(plan)):
        size = Sizes(plan, stage)
        stages.append(
            {
                "layers": [[chunk.layers.start, chunk.layers.stop - 1] for chunk in size.chunks],
                "parameters": size.parameters,
                "total": memory.total,
                "moment": memory.moment,
            }
        )
    return {
        "schedule": plan.config.schedule(1).name,
        "micro_batches": plan.micro_batches,
        "bubble": round(bubble(plan.config, plan.micro_batches), 4),
        "stages": stages,
    }


def fitting(plan: Setting, budget: int) -> dict[str, Any]:
    """The largest micro-batch, the cheapest layouts of this run, and where none fits the least."""
    now = cost(plan, batch=plan.config.train.micro_batch_size)

    def shown(candidate: Candidate) -> dict[str, Any]:
        return {
            "flags": " ".join(candidate.flags),
            "bytes": candidate.memory.total,
            "slower": round(candidate.than(now), 4),
        }

    found = [shown(candidate) for candidate in cheapest(plan, budget, 3)]
    return {
        "budget": budget,
        "as_asked": expected(plan).total <= budget,
        "largest_micro_batch": largest_micro_batch(plan, budget),
        "cheapest": found,
        "least": None if found else shown(smallest(plan)),
    }


def table(config: Config, plan: Setting | None, found: dict[str, Any]) -> list[str]:
    """What a person reads, line by line. plan: None with --accounting megatron-2019. found: as `facts` has it."""
    model, p = config.model, config.parallel.model_parallel_size
    counted, memory = found["parameters"], found["memory"]
    on = f"Megatron-LM of 2019, model-parallel {p}, fp16 on a GPU"
    pipeline = found.get("pipeline")
    if plan:
        stages = f"pipeline {plan.stages} × " if pipeline else ""
        on = (
            f"{plan.world_size} rank{'s' * (plan.world_size > 1)}, model-parallel {p} × "
            f"{stages}data-parallel {plan.data_parallel_size}, {found['precision']} on {plan.device}"
        )
    lines = aligned(
        [
            (
                "model",
                f"{model.num_layers} layers, hidden size {model.hidden_size}, {model.num_attention_heads} heads, "
                f"vocabulary {model.vocab_size:,}, sequence {config.data.seq_length:,}",
            ),
            (
                "layout",
                f"{on}, micro-batch {config.train.micro_batch_size}, recompute {config.train.recompute_granularity}",
            ),
            *(
                [
                    (
                        "schedule",
                        f"{pipeline['schedule']}, {pipeline['micro_batches']} micro-batches, "
                        f"{pipeline['bubble']:.0%} of a step idle if all layers are equally fast",
                    )
                ]
                if pipeline
                else []
            ),
            (
                "parameters",
                f"{counted['in_all']:,} in all, {counted['of_a_rank']:,} per rank" + (" at most" if pipeline else ""),
            ),
            ("12·l·h²", f"{counted['matrices_12lh2']:,} in the layers' matrices"),
        ]
    )
    if plan is None:
        of_2019 = found["megatron_2019"]
        lines += aligned(
            [
                (
                    "from step to step",
                    f"{in_mb(of_2019['from_step_to_step'])} MB: 20 bytes a parameter "
                    f"(12·l·h²: {of_2019['matrices_at_20_bytes']:,} bytes)",
                ),
                (
                    "without recompute",
                    f"{of_2019['activations_without_recompute']:,} bytes of activations: "
                    "l·(34·s·b·h + 5·b·s²·n) at one rank",
                ),
            ]
        )
    if pipeline:
        lines += ["", f"  {'stage':<8}{'layers':<24}{'parameters':>14}{'MB':>10}"]
        for stage, row in enumerate(pipeline["stages"]):
            layers = ", ".join(f"{first}-{last}" for first, last in row["layers"])
            lines.append(f"  {stage:<8}{layers:<24}{row['parameters']:>14,}{in_mb(row['total']):>10}")
    total = memory["total"]
    lines += ["", f"  of a rank, fullest in {memory['moment']}:", f"  {'part':<17}{'MB':>10}{'share':>8}"]
    lines += [
        f"  {part:<17}{in_mb(size):>10}{size / total:>8.1%}"
        for part, size in memory.items()
        if part not in ("total", "moment", "on_host") and size
    ]
    lines += [f"  {'all':<17}{in_mb(total):>10}{1:>8.1%}"]
    if memory["on_host"]:
        lines += [f"  and {in_mb(memory['on_host'])} MB of the host's memory"]
    return lines


def fitting_table(fits: dict[str, Any]) -> list[str]:
    """The lines about --memory-gb, of what `fitting` found."""
    budget = in_mb(fits["budget"])
    lines = [
        "",
        f"  in {budget} MB: " + ("fits as asked" if fits["as_asked"] else "does not fit as asked"),
        f"  largest micro-batch with these flags: {fits['largest_micro_batch'] or 'none'}",
    ]
    if not fits["cheapest"]:
        return [
            *lines,
            f"  no layout on so many ranks fits; the least is {in_mb(fits['least']['bytes'])} MB: "
            f"{fits['least']['flags']}",
        ]
    lines += ["  cheapest layouts of the same global batch:", f"  {'MB':>10}{'slower':>8}  flags to add"]
    return lines + [
        f"  {in_mb(row['bytes']):>10}{row['slower']:>8.0%}  {row['flags'] or '(none)'}" for row in fits["cheapest"]
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: this process's); returns the exit code."""
    words = sys.argv[1:] if argv is None else argv
    if "--help" in words or "-h" in words:
        words = ["--help"]  # this program's, not pretrain_gpt2.py's
    chosen, rest = options(words)
    launch, rest = launch_flags(rest)
    config = configuration(rest)
    parallel = config.parallel
    ranks = (
        chosen.ranks
        or launch.world_size
        or launch.nproc_per_node
        or (parallel.model_parallel_size * parallel.pipeline_model_parallel_size)
    )
    plan = setting(config, ranks) if chosen.accounting == "this" else None
    memory = expected(plan) if plan is not None else megatron_2019.megatron_2019(config)
    found = facts(config, plan, memory)
    if plan is not None and chosen.memory_gb is not None:
        found["fits"] = fitting(plan, int(chosen.memory_gb * GB))
    if chosen.json:
        print(json.dumps(found, indent=2))
    else:
        print("\n".join(table(config, plan, found) + (fitting_table(found["fits"]) if "fits" in found else [])))
    return 0 if "fits" not in found or found["fits"]["cheapest"] else 1


cli = program(main)

if __name__ == "__main__":
    cli()
