"""Print the parameters and the memory of one rank of a training run, by part. The program starts no run and allocates
no tensors:

    python tools/plan.py --model 345m --device cuda                           # any flags of pretrain_gpt2.py
    python tools/plan.py --model 1.5b --device cuda --ranks 8 --memory-gb 40  # what fits into 40 GB (2^30 bytes) a rank
    python tools/plan.py --model 345m --recompute-granularity full --accounting megatron-2019
    python tools/plan.py --model 1.5b --device cuda --pipeline-model-parallel-size 4   # a row for each stage
    python tools/plan.py --model 345m --json
    python tools/plan.py --model 345m --device cuda --cluster a100 --perfetto step.json   # the modelled time of a step
    python tools/plan.py --model 8.3b --device cuda --global-batch-size 512 --ranks 512 --cluster a100 --search

--search prints the ten fastest layouts that fit, of all tensor-, pipeline- and data-parallel sizes, schedules,
micro-batches, recomputation and sharding. All times are modelled, see megatron/gpt2/extensions/plan/simulate.py.

--device cuda plans for a GPU on any machine, in bf16 unless a precision is given. docs/explanation/memory.md explains
the parts.
Exit codes: 0 if all is well, 1 if no layout fits into --memory-gb, 2 for bad input.
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
from data_utils.command_line import Parser, plural, positive_int, require
from megatron.gpt2 import device as devices
from megatron.gpt2.checkpoint.interface import saved_decay_iters
from megatron.gpt2.checkpoint.save_folder import find_checkpoint
from megatron.gpt2.config import Config
from megatron.gpt2.config.arguments import Arguments, merge_checkpoint, parse
from megatron.gpt2.config.flags import parse_launch_flags
from megatron.gpt2.extensions.plan.cluster import Cluster, read_cluster
from megatron.gpt2.extensions.plan.memory import (
    CUDA_CONTEXT,
    PARTS,
    MemoryEstimate,
    MemoryInputs,
    estimate_memory,
    in_mb,
)
from megatron.gpt2.extensions.plan.search import (
    bubble,
    cheapest_offers,
    largest_micro_batch,
    search,
    smallest_offer,
    training_cost,
)
from megatron.gpt2.extensions.plan.simulate import StepTime, simulate, write_perfetto
from megatron.gpt2.model.gpt2 import count_parameters
from megatron.gpt2.monitor.log_lines import align_rows, resident_memory
from mpu.partition import padded_vocab_size

GPT2_VOCABULARY = 50257
MB, GB = 2**20, 2**30
BYTES_PER_PARAMETER = 20  # the training state of Megatron-LM in 2019
SUFFIXES = {"M": 1e6, "B": 1e9, "T": 1e12}
FAILURES = 0.0038  # failures of a node per day: 419 in 54 days of 2,048 nodes of H100 (arXiv:2407.21783, section 3.3.4)
RESTART = 600  # seconds from a failure to the first new step
SEARCHED_SHARE = 0.9  # --search finds layouts that use at most this share of a GPU's memory.


def parse_options(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Return plan.py's own flags and the remaining words, which are flags of training. Raises ValueError for bad
    flags."""
    usage = "%(prog)s [flags of pretrain_gpt2.py] [--ranks N] [--memory-gb X] [--accounting NAME] [--json]"
    parser = Parser(description=__doc__, usage=usage)
    add = parser.add_argument
    ranks = "ranks of the run (default: --world-size, --nproc-per-node, or the ranks that share one model)"
    add("--ranks", type=positive_int, metavar="N", help=ranks)
    fitting = "memory per rank in GB (2^30 bytes): print the layouts that fit"
    add("--memory-gb", type=positive_number, metavar="X", help=fitting)
    accounting = "count the memory of this program, or of Megatron-LM's first release in fp16 on a GPU"
    add("--accounting", choices=("this", "megatron-2019"), default="this", help=accounting)
    add("--cluster", metavar="NAME", help="a file of clusters/: model the time of a step there")
    add("--perfetto", type=Path, metavar="FILE.json", help="write a step for https://ui.perfetto.dev")
    add("--search", action="store_true", help="print the fastest layouts of --ranks on --cluster")
    tokens = "tokens of the whole training (300B): print days and GPU-hours"
    add("--tokens", type=positive_number, metavar="N", help=tokens)
    failures = "of a node and day (default: %(default)s)"
    add("--failures", type=positive_number, default=FAILURES, metavar="X", help=failures)
    stops = "that a checkpoint stops training (default: %(default)s)"
    add("--checkpoint-seconds", type=positive_number, default=60, metavar="X", help=stops)
    add("--json", action="store_true", help="print JSON, with sizes in bytes")
    chosen, rest = parser.parse_known_args(argv)
    if chosen.memory_gb is not None and chosen.accounting != "this":
        raise ValueError("--memory-gb finds layouts of this program only: leave --accounting out")
    if chosen.cluster is None and (chosen.search or chosen.perfetto or chosen.tokens):
        raise ValueError("--search, --perfetto and --tokens need a --cluster")
    return chosen, rest


def positive_number(text: str) -> float:
    """Return a positive number that may have a suffix M, B or T, as a type for argparse."""
    digits, scale = (text[:-1], SUFFIXES[text[-1]]) if text[-1:] in SUFFIXES else (text, 1.0)
    number = float(digits) * scale
    if not number > 0:
        raise argparse.ArgumentTypeError(f"must be positive, not {text}")
    return number


def planned_config(words: Sequence[str]) -> Config:
    """Return the configuration that the flags describe, completed with the vocabulary size and the shape of the
    checkpoint that the run would continue. `planned_config` reads no text."""
    arguments = parse(words)
    folders = arguments.checkpoint
    checkpoint = find_checkpoint(folders.load or str(folders.save), log=lambda line: None, verify=False)
    if checkpoint is not None and "config" in checkpoint.metadata:
        arguments = merge_checkpoint(arguments, checkpoint.metadata["config"], saved_decay_iters(checkpoint.metadata))
    config = arguments.config
    size = config.model.vocab_size or (checkpoint.metadata["vocab_size"] if checkpoint else vocabulary_size(arguments))
    return dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=size))


def vocabulary_size(arguments: Arguments) -> int:
    """Return the size of the tokenizer's vocabulary, if the flags decide it without any text."""
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


def planned_inputs(config: Config, ranks: int) -> MemoryInputs:
    """Return the planner's inputs for the device that the flags name. This machine may lack the device."""
    train, has_gpu = config.train, torch.cuda.is_available()
    device = train.device if train.device != "auto" else "cuda" if has_gpu else "cpu"
    dtype = torch.bfloat16
    if device == "cpu" or has_gpu or train.precision != "auto":
        dtype, _ = devices.choose_precision(train.precision, torch.device(device))
    # The planner has loaded the same libraries as a training process before it builds its model.
    fixed = CUDA_CONTEXT if device == "cuda" else resident_memory().get("resident", 0)
    return MemoryInputs(config, ranks, device, dtype, fixed, bool(devices.set_allocator(torch.device(device))))


def layer_matrices(config: Config) -> int:
    """Return 12·l·h², the elements of all layers' matrices if the MLP is 4h wide."""
    return 12 * config.model.num_layers * config.model.hidden_size**2


def layer_activations(*, s: int, b: int, h: int, n: int, p: int = 1) -> int:
    """Return the bytes of a layer's activations in 16 bits with stored attention scores: 34·s·b·h + 5·b·s²·n
    (arXiv:2205.05198, equations 1 and 2). Tensor parallelism splits 24·s·b·h and the scores over p ranks."""
    return 10 * s * b * h + (24 * s * b * h + 5 * b * s * s * n) // p


def megatron_2019(config: Config) -> tuple[MemoryEstimate, dict[str, int]]:
    """Return the peak memory of a rank with Megatron-LM's first release (2019) on a GPU in fp16, and three sums to
    print.

    NVIDIA published the peak memory with --checkpoint-activations, which is --recompute-granularity full here. CUDA's
    context is left out, because NVIDIA's figures are those of torch's allocator. `config` must have the vocabulary
    size.

    Megatron of 2019 stored 20 bytes per parameter between steps: weights and gradients in fp16 (2 + 2), and in float32
    masters, their gradients and two moments (16). Attention stored its scores. The peak is in the loss, with three
    float32 copies of the logits: the model's output, a clone minus the maximum, and its exponential, which becomes the
    gradient.
    """
    model, train, tp = config.model, config.train, config.parallel.tensor_model_parallel_size
    assert model.vocab_size is not None
    # Megatron padded the vocabulary to a multiple of the number of ranks, too.
    divisor = tp * model.make_vocab_size_divisible_by
    parameters = count_parameters(dataclasses.replace(model, make_vocab_size_divisible_by=divisor), tp)[1]
    s, b, h = config.data.seq_length, train.micro_batch_size, model.hidden_size
    hidden = 2 * s * b * h
    whole = model.num_layers * layer_activations(s=s, b=b, h=h, n=model.num_attention_heads, p=tp)
    # With recomputation, each group of layers saves only its input.
    inputs = -(-model.num_layers // train.recompute_num_layers) * hidden
    parts = dict.fromkeys(PARTS, 0) | {
        "weights": 2 * parameters,
        "gradients": 2 * parameters,
        "optimizer": (BYTES_PER_PARAMETER - 4) * parameters,
        # The outputs of the last layer and of the final norm are saved, too, and the dropout mask of the embeddings (1
        # byte per element).
        "activations": (inputs if train.recompute_granularity == "full" else whole) + 2 * hidden + hidden // 2,
        "logits and loss": 3 * 4 * s * b * padded_vocab_size(model.vocab_size, divisor, tp) // tp,
    }
    return MemoryEstimate("the loss", parts, parameters=parameters), {
        "from_step_to_step": BYTES_PER_PARAMETER * parameters,
        "matrices_at_20_bytes": BYTES_PER_PARAMETER * layer_matrices(config),
        "activations_without_recompute": whole,
    }


def plan_memory(config: Config, plan: MemoryInputs | None) -> tuple[dict[str, Any], list[str]]:
    """Return the numbers of the plan for --json, and the lines of the plan's tables.

    plan: None for --accounting megatron-2019.
    """
    model, train, tp = config.model, config.train, config.parallel.tensor_model_parallel_size
    details: dict[str, Any] = {}
    rows: list[tuple[str, str]] = []
    stage_lines: list[str] = []
    if plan is None:
        memory, sums = megatron_2019(config)
        memories, details["megatron_2019"] = [memory], sums
        layout = f"Megatron-LM of 2019, tensor-parallel {tp}, fp16 on a GPU"
        between, matrices, activations = sums.values()
        rows += [
            ("from step to step", f"{in_mb(between)} MB: 20 bytes a parameter (12·l·h²: {matrices:,} bytes)"),
            ("without recompute", f"{activations:,} bytes of activations: l·(34·s·b·h + 5·b·s²·n) at one rank"),
        ]
    else:
        memories = [estimate_memory(plan, stage) for stage in range(plan.stages)]
        dp, precision = plan.data_parallel_size, devices.PRECISIONS[plan.dtype]
        details = {"ranks": plan.world_size, "data_parallel": dp, "device": plan.device, "precision": precision}
        stages = f"pipeline {plan.stages} × " * (plan.stages > 1)
        layout = f"{plural(plan.world_size, 'rank')}, tensor-parallel {tp} × {stages}data-parallel {dp}"
        layout += f", {precision} on {plan.device}"
    if plan is not None and plan.stages > 1:
        schedule, m, chunks = config.pipeline_schedule(1).name, plan.num_microbatches, config.layers_of_virtual_stages()
        idle = bubble(config, m)
        rows.append(
            ("schedule", f"{schedule}, {m} micro-batches, {idle:.0%} of a step idle if all layers are equally fast")
        )
        details["pipeline"] = {"schedule": schedule, "micro_batches": m, "bubble": round(idle, 4), "stages": []}
        stage_lines += ["", f"  {'stage':<8}{'layers':<24}{'parameters':>14}{'MB':>10}"]
        for stage, of_stage in enumerate(memories):
            layers = [[chunk.start, chunk.stop - 1] for chunk in chunks[stage :: plan.stages]]
            numbers = {"parameters": of_stage.parameters, "total": of_stage.total, "moment": of_stage.moment}
            details["pipeline"]["stages"].append({"layers": layers, **numbers})
            shown = ", ".join(f"{first}-{last}" for first, last in layers)
            stage_lines.append(f"  {stage:<8}{shown:<24}{of_stage.parameters:>14,}{in_mb(of_stage.total):>10}")
    memory, of_a_rank = max(memories, key=lambda each: each.total), max(each.parameters for each in memories)
    in_all, matrices = count_parameters(model, tp)[0], layer_matrices(config)
    counts = {"in_all": in_all, "of_a_rank": of_a_rank, "matrices_12lh2": matrices}
    memory_numbers = {**memory.parts, "total": memory.total, "moment": memory.moment, "on_host": memory.on_host}
    shape = (
        f"{plural(model.num_layers, 'layer')}, hidden size {model.hidden_size}, "
        f"{plural(model.num_attention_heads, 'head')}, vocabulary {model.vocab_size:,}, "
        f"sequence {config.data.seq_length:,}"
    )
    lines = align_rows(
        [
            ("model", shape),
            ("layout", f"{layout}, micro-batch {train.micro_batch_size}, recompute {train.recompute_granularity}"),
            ("parameters", f"{in_all:,} in all, {of_a_rank:,} per rank{' at most' if stage_lines else ''}"),
            ("12·l·h²", f"{matrices:,} in the layers' matrices"),
            *rows,
        ]
    )
    lines += [*stage_lines, "", f"  of a rank, largest in {memory.moment}:", f"  {'part':<17}{'MB':>10}{'share':>8}"]
    for part, size in [*memory.parts.items(), ("all", memory.total)]:
        if size >= MB // 2:
            lines.append(f"  {part:<17}{in_mb(size):>10}{size / memory.total:>8.1%}")
    if memory.on_host >= MB // 2:
        lines.append(f"  and {in_mb(memory.on_host)} MB of host memory")
    return {"parameters": counts, "memory": memory_numbers, **details}, lines


def plan_fits(plan: MemoryInputs, budget: int) -> tuple[dict[str, Any], list[str]]:
    """Return the largest micro-batch and the cheapest layouts that fit, or the smallest layout if none fits, and the
    lines to print."""
    fits, largest = estimate_memory(plan).total <= budget, largest_micro_batch(plan, budget)
    found = cheapest_offers(plan, budget)
    least = None if found else smallest_offer(plan)
    lines = [
        "",
        f"  in {in_mb(budget)} MB: {'fits' if fits else 'does not fit'} with these flags",
        f"  largest micro-batch: {largest or 'none'}",
    ]
    if least:
        lines.append(f"  no layout on these ranks fits; the smallest needs {in_mb(least.bytes)} MB: {least.flags}")
    else:
        lines += ["  cheapest layouts of the same global batch:", f"  {'MB':>10}{'step':>13}  flags to add"]
        lines += [
            f"  {in_mb(size):>10}{abs(slower):>6.0%} {'faster' if slower < 0 else 'slower'}  {flags or '(none)'}"
            for flags, size, slower in found
        ]
    return {
        "budget": budget,
        "as_asked": fits,
        "largest_micro_batch": largest,
        "cheapest": [offer._asdict() for offer in found],
        "least": least and least._asdict(),
    }, lines


def plan_time(
    inputs: MemoryInputs, cluster: Cluster, options: argparse.Namespace, step: StepTime
) -> tuple[dict[str, Any], list[str]]:
    """Return the modelled numbers of a step, and of the whole training if --tokens is given, and the lines to print."""
    config, ranks = inputs.config, inputs.world_size
    samples = config.train.micro_batch_size * inputs.data_parallel_size * inputs.num_microbatches
    rate = samples * config.data.seq_length / step.seconds
    mfu = rate * config.model.flops_per_token(config.data.seq_length) / ranks / cluster.peak_flops
    shares = {name: seconds / step.seconds for name, seconds in step.parts.items()}
    numbers: dict[str, Any] = {"seconds": step.seconds, "tokens_per_second": rate, "mfu": mfu, "shares": shares}
    rows = [
        ("step", f"{step.seconds:.4g} s, {rate:,.0f} tokens/s, {mfu:.1%} MFU (modelled)"),
        ("", ", ".join(f"{name} {share:.1%}" for name, share in shares.items() if share >= 0.0005)),
    ]
    if options.tokens is not None:
        nodes = -(-ranks // cluster.gpus_per_node)
        cost = training_cost(options.tokens, rate, ranks, nodes, options.failures, options.checkpoint_seconds, RESTART)
        numbers["training"] = cost._asdict()
        lost = f"{cost.lost:.1%} lost by failures, a checkpoint every {cost.interval / 60:.0f} minutes"
        rows.append(("training", f"{cost.days:,.1f} days, {cost.gpu_hours:,.0f} GPU-hours; {lost}"))
    return numbers, align_rows(rows)


def print_search(config: Config, cluster: Cluster, options: argparse.Namespace, ranks: int) -> int:
    """Print the fastest layouts. Return the exit code."""
    require(config.train.global_batch_size is not None, "--search needs a --global-batch-size")
    budget = int(options.memory_gb * GB) if options.memory_gb else int(SEARCHED_SHARE * cluster.memory)
    results, lines = [], list[str]()
    for number, (candidate, step) in enumerate(search(planned_inputs(config, ranks), cluster, budget, 10), start=1):
        flags, size = " ".join(candidate.flags), candidate.memory.total
        numbers, more_lines = plan_time(candidate.inputs, cluster, options, step)
        results.append({"flags": flags, "bytes": size, **numbers})
        lines += ["", f"{number:>2}. {flags or '(no flags)'}", f"  memory    {in_mb(size)} MB", *more_lines]
    nothing = f"  no layout on {plural(ranks, 'rank')} fits into {in_mb(budget)} MB"
    print(json.dumps({"budget": budget, "found": results}, indent=2) if options.json else "\n".join(lines) or nothing)
    return 0 if results else 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: sys.argv[1:]). Return the exit code."""
    words = sys.argv[1:] if argv is None else argv
    if "--help" in words or "-h" in words:
        words = ["--help"]  # Print the help of plan.py, not of pretrain_gpt2.py.
    options, rest = parse_options(words)
    launch, rest = parse_launch_flags(rest)
    config = planned_config(rest)
    model_ranks = config.parallel.tensor_model_parallel_size * config.parallel.pipeline_model_parallel_size
    ranks = options.ranks or launch.world_size or launch.nproc_per_node or model_ranks
    cluster = read_cluster(options.cluster)[0] if options.cluster else None
    if cluster and options.search:
        return print_search(config, cluster, options, ranks)
    plan = planned_inputs(config, ranks) if options.accounting == "this" else None
    results, lines = plan_memory(config, plan)
    if plan is not None and cluster is not None:
        step = simulate(plan, cluster, record=options.perfetto is not None)
        results["time"], more_lines = plan_time(plan, cluster, options, step)
        lines += ["", *more_lines]
        if options.perfetto:
            write_perfetto(step, options.perfetto)
    if plan is not None and options.memory_gb is not None:
        results["fits"], more_lines = plan_fits(plan, int(options.memory_gb * GB))
        lines += more_lines
    print(json.dumps(results, indent=2) if options.json else "\n".join(lines))
    return 1 if results.get("fits", {}).get("least") else 0
