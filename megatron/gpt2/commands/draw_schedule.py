"""What each rank of a pipeline does, and when; nothing is started:

    python tools/draw_schedule.py --pipeline-model-parallel-size 4 --micro-batches 8
    python tools/draw_schedule.py --pipeline-model-parallel-size 4 --pipeline-schedule zero-bubble --svg schedule.svg
    python tools/draw_schedule.py --pipeline-model-parallel-size 2 --pipeline-schedule interleaved \\
        --num-layers 8 --num-layers-per-virtual-pipeline-stage 2 --times 1,1.2,0.9

F is forward, B backward and W the gradients of the weights, a part of B where the schedule does not split it. Each is
followed by the number of its micro-batch, and by the letter of the chunk where a rank has several. A dot is a rank that
waits. docs/explanation/parallelism.md explains the schedules.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from data_utils.command_line import Parser
from megatron.gpt2.pipeline.analysis import as_text, draw, equal_costs, kept, published_length, timetable
from megatron.gpt2.pipeline.program import Costs
from megatron.gpt2.pipeline.schedule import (
    FIRST,
    LAST,
    SCHEDULES,
    Schedule,
    build_schedule,
    layers_of_stages,
    virtual_stages,
)

SIZE, CHUNK = "--pipeline-model-parallel-size", "--num-layers-per-virtual-pipeline-stage"


def options(argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags. ValueError, which names the flag, if one cannot be."""
    parser = Parser(description=__doc__)
    parser.add_argument(SIZE, type=int, metavar="P", help="ranks of the pipeline", required=True)
    parser.add_argument("--pipeline-schedule", default="1f1b", choices=SCHEDULES, help="default: 1f1b")
    parser.add_argument("--micro-batches", type=int, metavar="M", default=8, help="of a step (default: 8)")
    for flag, metavar, help in (
        ("--num-layers", "L", "layers of the model: a stage takes as long as its share (default: all alike)"),
        (CHUNK, "N", "layers of one chunk, for --pipeline-schedule interleaved; needs --num-layers"),
        (FIRST, "N", "layers of the first rank; needs --num-layers"),
        (LAST, "N", "layers of the last rank; needs --num-layers"),
    ):
        parser.add_argument(flag, type=int, metavar=metavar, help=help)
    parser.add_argument(
        "--times",
        default="1,1,1",
        metavar="F,B,W",
        help="how long a rank's forward, its backward and its weights' gradients take for one "
        "micro-batch (default: 1,1,1)",
    )
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw it into FILE")
    chosen = parser.parse_args(argv)
    for flag in (CHUNK, FIRST, LAST):
        if chosen.num_layers is None and getattr(chosen, flag[2:].replace("-", "_")) is not None:
            raise ValueError(f"{flag} needs --num-layers")
    return chosen


def times_of(words: str) -> tuple[float, float, float]:
    """The three numbers of --times."""
    try:
        forward, backward, weight = map(float, words.split(","))
    except ValueError:
        raise ValueError(f"--times takes three numbers, of F, B and W, as in 1,1.2,0.9, not {words}") from None
    if not all(0 < time < float("inf") for time in (forward, backward, weight)):
        raise ValueError(f"--times must be positive, not {words}")
    return forward, backward, weight


def plan(chosen: argparse.Namespace, times: tuple[float, float, float]) -> tuple[Schedule, list[Costs]]:
    """The schedule that the flags mean, and the times of its stages."""
    p, size = chosen.pipeline_model_parallel_size, chosen.num_layers_per_virtual_pipeline_stage
    v = virtual_stages(chosen.num_layers, p, size) if size is not None and p > 0 else 1
    schedule = build_schedule(chosen.pipeline_schedule, p, v, chosen.micro_batches)
    costs = equal_costs(schedule, *times)
    if chosen.num_layers is not None:
        layers = layers_of_stages(
            chosen.num_layers, p, v, chosen.decoder_first_pipeline_num_layers, chosen.decoder_last_pipeline_num_layers
        )
        costs = [Costs(*(time * p * len(own) / chosen.num_layers for time in times)) for own in layers]
    return schedule, costs


def report(schedule: Schedule, costs: Sequence[Costs], times: tuple[float, float, float]) -> list[str]:
    """The numbers below the lines of the ranks."""
    table = timetable(schedule, costs)
    work = schedule.micro_batches * sum(times)
    lines = [
        f"step          {table.length:.4g}, of which each rank works {work:.4g} on the average: a bubble of "
        f"{table.bubble:.1%}"
    ]
    if len(set(costs)) == 1 and (schedule.chunks == 1 or schedule.micro_batches % schedule.p == 0):
        lines.append(f"as published  {published_length(schedule, *times):.4g}")
    lines.append(
        f"kept at most  {_listed(kept(schedule, queued=0))} micro-batches"
        f"{' of one chunk' * (schedule.chunks > 1)} between F and B, by rank"
    )
    if schedule.splits_backward:
        lines.append(f"              {_listed(kept(schedule))} with those whose W is to come")
    return lines


def _listed(numbers: Sequence[float]) -> str:
    return ", ".join(f"{number:g}" for number in numbers)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line `argv` (default: this process's)."""
    chosen = options(argv)
    times = times_of(chosen.times)
    schedule, costs = plan(chosen, times)
    chunks = f" of {schedule.chunks} chunks" if schedule.chunks > 1 else ""
    what = (
        f"{schedule.name}: {schedule.p} rank{'s' * (schedule.p > 1)}{chunks}, {schedule.micro_batches} "
        f"micro-batch{'es' * (schedule.micro_batches > 1)}; F, B, W take {_listed(times)}"
    )
    table = timetable(schedule, costs)
    print("\n".join([what, "", *as_text(schedule, table), "", *report(schedule, costs, times)]))
    if chosen.svg:
        title = f"{what}. Step {table.length:.4g}, bubble {table.bubble:.0%}"
        draw(schedule, table, title, chosen.svg)
