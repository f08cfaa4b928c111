"""Write a page that shows a modelled training step: what each rank computes and sends, and when. Nothing is started:

    python tools/show_step.py --output step.html --cluster a100 --ranks 8 --device cuda --num-layers 8 \\
        --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --global-batch-size 32

The other flags are those of pretrain_gpt2.py. The page has a lane for each queue of the first rank of each stage. Its
buttons go from one kernel, collective or message to the next, with their shapes, bytes and lines of the program. Choose
few layers and micro-batches, because the page has all of their kernels.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from data_utils.command_line import Parser, plural
from megatron.gpt2.extensions.plan.cluster import read_cluster
from megatron.gpt2.extensions.plan.command import planned_config, planned_inputs
from megatron.gpt2.extensions.plan.memory import MemoryInputs
from megatron.gpt2.extensions.plan.simulate import StepTime, simulate

PAGE = Path(__file__).with_name("page.html")


def page(inputs: MemoryInputs, step: StepTime, cluster: str) -> str:
    """Return the HTML page of a step that has recorded its spans."""
    parallel, of_stage = inputs.config.parallel, inputs.world_size // inputs.stages
    about = (
        f"{plural(inputs.world_size, 'rank')} of {cluster}: tensor {parallel.tensor_model_parallel_size} × pipeline "
        f"{inputs.stages} × data {inputs.data_parallel_size}, {inputs.num_microbatches} micro-batches. The "
        "lanes are those of the first rank of each stage; the other ranks of a stage do the same."
    )
    spans = [
        (*span[:3], round(1e6 * span.start, 3), round(1e6 * span.end, 3), span.text)
        for span in sorted(step.spans, key=lambda span: span.start)
    ]
    data = json.dumps({"about": about, "ranks": list(range(0, inputs.world_size, of_stage)), "spans": spans})
    return PAGE.read_text(encoding="utf-8").replace("DATA", data.replace("<", "\\u003c"))


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line `argv` (default: this process's)."""
    parser = Parser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, metavar="FILE.html", help="the page")
    parser.add_argument("--cluster", required=True, metavar="NAME", help="a file of clusters/")
    parser.add_argument("--ranks", type=int, required=True, metavar="N", help="ranks of the run")
    chosen, rest = parser.parse_known_args(argv)
    cluster, _ = read_cluster(chosen.cluster)
    inputs = planned_inputs(planned_config(rest), chosen.ranks)
    step = simulate(inputs, cluster, record=True)
    chosen.output.write_text(page(inputs, step, chosen.cluster), encoding="utf-8")
    print(f"{chosen.output}: {step.seconds:.4g} s (modelled), {len(step.spans):,} kernels, collectives and messages")
