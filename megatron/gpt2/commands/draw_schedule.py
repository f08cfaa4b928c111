"""Print and draw what each rank of a pipeline does, and when, without starting ranks:

    python tools/draw_schedule.py --pipeline-model-parallel-size 4 --micro-batches 8
    python tools/draw_schedule.py --pipeline-model-parallel-size 4 --pipeline-schedule zero-bubble --svg schedule.svg
    python tools/draw_schedule.py --pipeline-model-parallel-size 2 --pipeline-schedule interleaved \\
        --num-layers 8 --num-layers-per-virtual-pipeline-stage 2 --times 1,1.2,0.9

In the output, F is a forward, B a backward, and W the computation of weight gradients. B includes W unless the schedule
splits the backward. The micro-batch's number follows the letter, then the letter of the chunk if a rank has several
chunks. A dot means that the rank waits. docs/explanation/parallelism.md explains the schedules.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from data_utils.command_line import Parser, plural, require
from megatron.gpt2.pipeline.analysis import (
    draw_timetable,
    max_in_flight,
    render_text,
    timetable,
    uniform_costs,
)
from megatron.gpt2.pipeline.p2p_schedule import ActionCosts
from megatron.gpt2.pipeline.schedule import (
    FIRST_LAYERS_FLAG,
    LAST_LAYERS_FLAG,
    SCHEDULES,
    build_schedule,
    layers_of_virtual_stages,
    num_model_chunks,
)

CHUNK = "--num-layers-per-virtual-pipeline-stage"


def parse_times(text: str) -> tuple[float, ...]:
    """Parse the three numbers of --times."""
    try:
        times = tuple(map(float, text.split(",")))
    except ValueError:
        times = ()
    if len(times) != 3 or not all(0 < time < float("inf") for time in times):
        raise argparse.ArgumentTypeError(f"give three positive numbers, for F, B and W, as in 1,1.2,0.9, not {text}")
    return times


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the flags. Raises ValueError with the name of an invalid flag."""
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("--pipeline-model-parallel-size", type=int, metavar="P", help="ranks of the pipeline", required=True)
    add("--pipeline-schedule", default="1f1b", choices=SCHEDULES, help="default: 1f1b")
    add("--micro-batches", type=int, metavar="M", default=8, help="of a step (default: 8)")
    layers = "layers of the model: a stage takes as long as its share (default: all alike)"
    add("--num-layers", type=int, metavar="L", help=layers)
    for flag, whose in (
        (CHUNK, "one chunk, for --pipeline-schedule interleaved"),
        (FIRST_LAYERS_FLAG, "the first rank"),
        (LAST_LAYERS_FLAG, "the last rank"),
    ):
        add(flag, type=int, metavar="N", help=f"layers of {whose}; needs --num-layers")
    times = "time that a rank needs for forward, backward and weight gradients of one micro-batch (default: 1,1,1)"
    add("--times", type=parse_times, default="1,1,1", metavar="F,B,W", help=times)
    add("--svg", type=Path, metavar="FILE", help="draw the schedule into FILE")
    args = parser.parse_args(argv)
    for flag in (CHUNK, FIRST_LAYERS_FLAG, LAST_LAYERS_FLAG):
        given = getattr(args, flag[2:].replace("-", "_")) is not None
        require(not given or args.num_layers is not None, f"{flag} needs --num-layers")
    return args


def _listed(numbers: Sequence[float]) -> str:
    return ", ".join(f"{number:g}" for number in numbers)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line `argv` (default: sys.argv[1:])."""
    args = parse_args(argv)
    pp, layers, size = args.pipeline_model_parallel_size, args.num_layers, args.num_layers_per_virtual_pipeline_stage
    vpp = num_model_chunks(layers, pp, size) if size is not None and pp > 0 else 1
    schedule = build_schedule(args.pipeline_schedule, pp, vpp, args.micro_batches)
    costs = uniform_costs(schedule, *args.times)
    if layers is not None:
        first, last = args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers
        shares = [
            pp * len(stage_layers) / layers for stage_layers in layers_of_virtual_stages(layers, pp, vpp, first, last)
        ]
        costs = [ActionCosts(*(time * share for time in args.times)) for share in shares]
    table = timetable(schedule, costs)
    m, has_chunks = schedule.num_microbatches, schedule.num_model_chunks > 1
    what = (
        f"{schedule.name}: {plural(pp, 'rank')}{f' of {schedule.num_model_chunks} chunks' * has_chunks}, "
        f"{m} micro-batch{'es' * (m > 1)}; F, B, W take {_listed(args.times)}"
    )
    work, bubble = m * sum(args.times), f"a bubble of {table.bubble:.1%}"
    print("\n".join([what, "", *render_text(schedule, table), ""]))
    print(f"step          {table.length:.4g}, of which each rank works {work:.4g} on the average: {bubble}")
    in_flight = f"{_listed(max_in_flight(schedule, queued=0))} micro-batches{' of one chunk' * has_chunks}"
    print(f"kept at most  {in_flight} between F and B, by rank")
    if schedule.splits_backward:
        print(f"              {_listed(max_in_flight(schedule))} with those whose W is to come")
    if args.svg:
        draw_timetable(schedule, table, f"{what}. Step {table.length:.4g}, bubble {table.bubble:.0%}", args.svg)
