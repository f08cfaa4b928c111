"""Write a page that shows what each rank computes and sends in a training step, and when. The step is modelled, or was
profiled in a real run:

    python tools/show_step.py --output step.html --cluster a100 --ranks 8 --device cuda --num-layers 8 \\
        --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --global-batch-size 32
    python tools/show_step.py --output step.html --traces SAVE/profile_3-3_rank_*.json.gz

--traces reads what pretrain_gpt2.py --profile 3 3 --profile-ranks 0 1 wrote: operators with their shapes, and
collectives of gloo, for which the profiler records no bytes and groups. Without --traces, show_step.py takes the flags
of pretrain_gpt2.py and starts no run.

The page has a lane for each queue. The queues of a modelled step are those of the first rank of each stage. The page's
buttons go from one kernel, collective or message to the next. The page shows the shapes of a kernel, the bytes of a
message, and the line of the program. Choose few layers and micro-batches, because the page contains all of their
kernels.
"""

import gzip
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from data_utils.command_line import Parser, plural, require
from megatron.gpt2.extensions.plan.cluster import read_cluster
from megatron.gpt2.extensions.plan.command import planned_config, planned_inputs
from megatron.gpt2.extensions.plan.simulate import QueueSpan, simulate

PAGE = Path(__file__).with_name("page.html")


def page(about: str, ranks: Sequence[int], spans: Sequence[QueueSpan]) -> str:
    """Return the HTML page.

    ranks: for each stage, the number of the rank that the page shows.
    """
    rows = [
        (*span[:3], round(1e6 * span.start, 3), round(1e6 * span.end, 3), span.text)
        for span in sorted(spans, key=lambda span: span.start)
    ]
    data = json.dumps({"about": about, "ranks": ranks, "spans": rows})
    return PAGE.read_text(encoding="utf-8").replace("DATA", data.replace("<", "\\u003c"))


def measured_spans(number: int, trace: dict[str, Any], start: float) -> Iterator[QueueSpan]:
    """Yield the outermost operators of each thread in a trace of torch's profiler, and the collectives.

    number: the number of the rank's lanes.
    start: the origin of the times, in microseconds.
    """
    ends = defaultdict[int, float](float)
    timed = [event for event in trace["traceEvents"] if event.get("cat") in ("cpu_op", "user_annotation")]
    for event in sorted(timed, key=lambda event: (event["ts"], -event["dur"])):
        name, first, end = event["name"], event["ts"], event["ts"] + event["dur"]
        is_collective = name.startswith("gloo:")
        if is_collective or (event["cat"] == "cpu_op" and first >= ends[event["tid"]]):
            queue = ("pipeline" if name in ("gloo:send", "gloo:recv") else "other") if is_collective else "compute"
            shapes = " × ".join(map(str, filter(None, event["args"].get("Input Dims", []))))
            yield QueueSpan(number, queue, name, (first - start) / 1e6, (end - start) / 1e6, shapes)
            ends[event["tid"]] = end


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line `argv` (default: sys.argv[1:])."""
    parser = Parser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, metavar="FILE.html", help="the page")
    parser.add_argument("--cluster", metavar="NAME", help="a file of clusters/")
    parser.add_argument("--ranks", type=int, metavar="N", help="ranks of the run")
    parser.add_argument(
        "--traces", nargs="+", type=Path, metavar="FILE.json.gz", help="of a real run, one of each rank"
    )
    chosen, rest = parser.parse_known_args(argv)
    if chosen.traces:
        require(not rest, f"--traces takes no flags of the training: leave out {' '.join(rest)}")
        traces = [json.loads(gzip.decompress(path.read_bytes())) for path in chosen.traces]
        start = min(event["ts"] for trace in traces for event in trace["traceEvents"] if event.get("cat") == "cpu_op")
        spans = [span for number, trace in enumerate(traces) for span in measured_spans(number, trace, start)]
        ranks = [trace.get("distributedInfo", {}).get("rank", 0) for trace in traces]
        about, kind = f"Measured on {plural(len(ranks), 'rank')} by torch's profiler, which slows the run.", "measured"
    else:
        require(chosen.cluster and chosen.ranks, "give --cluster and --ranks, or --traces")
        cluster, _ = read_cluster(chosen.cluster)
        inputs = planned_inputs(planned_config(rest), chosen.ranks)
        spans = list(simulate(inputs, cluster, record=True).spans)
        ranks = list(range(0, inputs.world_size, inputs.world_size // inputs.stages))
        sizes = inputs.config.parallel.tensor_model_parallel_size, inputs.stages, inputs.data_parallel_size
        about = (
            f"Modelled: {plural(inputs.world_size, 'rank')} of {chosen.cluster}, tensor × pipeline × data parallel "
            f"{' × '.join(map(str, sizes))}, {inputs.num_microbatches} micro-batches. The lanes are those of the first "
            "rank of each stage; the other ranks of a stage do the same."
        )
        kind = "modelled"
    chosen.output.write_text(page(about, ranks, spans), encoding="utf-8")
    seconds = max(span.end for span in spans)
    print(f"{chosen.output}: {seconds:.4g} s ({kind}), {len(spans):,} kernels, collectives and messages")
