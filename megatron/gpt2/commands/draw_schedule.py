"""Print and draw what each rank of a pipeline does, and when, without starting ranks:

    python tools/draw_schedule.py --pipeline-model-parallel-size 4 --micro-batches 8
    python tools/draw_schedule.py --pipeline-model-parallel-size 4 --pipeline-schedule zero-bubble --svg schedule.svg
    python tools/draw_schedule.py --pipeline-model-parallel-size 2 --pipeline-schedule interleaved \\
        --num-layers 8 --num-layers-per-virtual-pipeline-stage 2 --times 1,1.2,0.9

F is forward, B backward, and W the gradients of the weights, which are a part of B if the schedule does not split it.
The number of the micro-batch follows, and the letter of the chunk if a rank has several. A dot means that the rank
waits. docs/explanation/parallelism.md explains the schedules.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from data_utils.command_line import Parser
from megatron.gpt2.pipeline.analysis import (
    draw_timetable,
    max_in_flight,
    published_length,
    render_text,
    timetable,
    uniform_costs,
)
from megatron.gpt2.pipeline.p2p_schedule import StageCosts
from megatron.gpt2.pipeline.schedule import (
    FIRST_LAYERS_FLAG,
    LAST_LAYERS_FLAG,
    SCHEDULES,
    PipelineSchedule,
    build_schedule,
    layers_of_stages,
    virtual_stages,
)

SIZE, CHUNK = "--pipeline-model-parallel-size", "--num-layers-per-virtual-pipeline-stage"


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the flags. Raises ValueError, which names the flag, if one is invalid."""
    parser = Parser(description=__doc__)
    parser.add_argument(SIZE, type=int, metavar="P", help="ranks of the pipeline", required=True)
    parser.add_argument("--pipeline-schedule", default="1f1b", choices=SCHEDULES, help="default: 1f1b")
    parser.add_argument("--micro-batches", type=int, metavar="M", default=8, help="of a step (default: 8)")
    for flag, metavar, help in (
        ("--num-layers", "L", "layers of the model: a stage takes as long as its share (default: all alike)"),
        (CHUNK, "N", "layers of one chunk, for --pipeline-schedule interleaved; needs --num-layers"),
        (FIRST_LAYERS_FLAG, "N", "layers of the first rank; needs --num-layers"),
        (LAST_LAYERS_FLAG, "N", "layers of the last rank; needs --num-layers"),
    ):
        parser.add_argument(flag, type=int, metavar=metavar, help=help)
    parser.add_argument(
        "--times",
        default="1,1,1",
        metavar="F,B,W",
        help="time that a rank needs for forward, backward and weight gradients of one micro-batch (default: 1,1,1)",
    )
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the schedule into FILE")
    args = parser.parse_args(argv)
    for flag in (CHUNK, FIRST_LAYERS_FLAG, LAST_LAYERS_FLAG):
        if args.num_layers is None and getattr(args, flag[2:].replace("-", "_")) is not None:
            raise ValueError(f"{flag} needs --num-layers")
    return args


def parse_times(words: str) -> tuple[float, float, float]:
    """Parse the three numbers of --times."""
    try:
        forward, backward, weight = map(float, words.split(","))
    except ValueError:
        raise ValueError(f"--times takes three numbers, of F, B and W, as in 1,1.2,0.9, not {words}") from None
    if not all(0 < time < float("inf") for time in (forward, backward, weight)):
        raise ValueError(f"--times must be positive, not {words}")
    return forward, backward, weight


def build_plan(
    args: argparse.Namespace, times: tuple[float, float, float]
) -> tuple[PipelineSchedule, list[StageCosts]]:
    """Build the schedule that the flags describe, and the times of its stages."""
    p, size = args.pipeline_model_parallel_size, args.num_layers_per_virtual_pipeline_stage
    v = virtual_stages(args.num_layers, p, size) if size is not None and p > 0 else 1
    schedule = build_schedule(args.pipeline_schedule, p, v, args.micro_batches)
    costs = uniform_costs(schedule, *times)
    if args.num_layers is not None:
        layers = layers_of_stages(
            args.num_layers, p, v, args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers
        )
        costs = [StageCosts(*(time * p * len(own) / args.num_layers for time in times)) for own in layers]
    return schedule, costs


def summarize_schedule(
    schedule: PipelineSchedule, costs: Sequence[StageCosts], times: tuple[float, float, float]
) -> list[str]:
    """Return the lines below those of the ranks."""
    table = timetable(schedule, costs)
    work = schedule.num_microbatches * sum(times)
    lines = [
        f"step          {table.length:.4g}, of which each rank works {work:.4g} on the average: a bubble of "
        f"{table.bubble:.1%}"
    ]
    if len(set(costs)) == 1 and (schedule.num_chunks == 1 or schedule.num_microbatches % schedule.num_ranks == 0):
        lines.append(f"as published  {published_length(schedule, *times):.4g}")
    lines.append(
        f"kept at most  {_listed(max_in_flight(schedule, queued=0))} micro-batches"
        f"{' of one chunk' * (schedule.num_chunks > 1)} between F and B, by rank"
    )
    if schedule.splits_backward:
        lines.append(f"              {_listed(max_in_flight(schedule))} with those whose W is to come")
    return lines


def _listed(numbers: Sequence[float]) -> str:
    return ", ".join(f"{number:g}" for number in numbers)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line `argv` (default: this process's)."""
    args = parse_args(argv)
    times = parse_times(args.times)
    schedule, costs = build_plan(args, times)
    chunks = f" of {schedule.num_chunks} chunks" if schedule.num_chunks > 1 else ""
    what = (
        f"{schedule.name}: {schedule.num_ranks} rank{'s' * (schedule.num_ranks > 1)}{chunks}, "
        f"{schedule.num_microbatches} micro-batch{'es' * (schedule.num_microbatches > 1)}; F, B, W take {_listed(times)}"
    )
    table = timetable(schedule, costs)
    print("\n".join([what, "", *render_text(schedule, table), "", *summarize_schedule(schedule, costs, times)]))
    if args.svg:
        title = f"{what}. Step {table.length:.4g}, bubble {table.bubble:.0%}"
        draw_timetable(schedule, table, title, args.svg)
