"""Test the modelled time of a step, and the search for layouts. Modelled steps are compared with sums and formulas."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.profiler import profile

from megatron.gpt2.extensions.plan.cluster import ROOT, Cluster, collective_key, read_cluster
from megatron.gpt2.extensions.plan.command import main
from megatron.gpt2.extensions.plan.search import DAY, training_cost
from megatron.gpt2.extensions.plan.show_step import main as show_step
from megatron.gpt2.extensions.plan.simulate import StepTime, simulate, stage_jobs
from megatron.gpt2.pipeline.analysis import timetable
from megatron.gpt2.pipeline.p2p_schedule import ActionCosts
from megatron.gpt2.pipeline.schedule import Kind
from tests.fork_server import WarmPython
from tests.megatron.gpt2.extensions.plan.test_memory import gpu_inputs
from tests.megatron.gpt2.extensions.serve.test_server_process import open_page

SHAPE = "--hidden-size 512 --num-attention-heads 8 --seq-length 256 --max-position-embeddings 256 --num-layers"
PIPELINE = f"{SHAPE} 12 --pipeline-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 16"


def cluster(**changes: Any) -> Cluster:
    return dataclasses.replace(read_cluster("a100")[0], **changes)


def seconds_of(step: StepTime, queue: str) -> float:
    return sum(span.end - span.start for span in step.spans if span.queue == queue)


@pytest.mark.parametrize(
    "flags, ranks",
    [
        (f"{SHAPE} 10 --micro-batch-size 8 --global-batch-size 48", 1),
        (f"{PIPELINE} --num-layers 20 --use-distributed-optimizer", 4),
        (f"{PIPELINE} --num-layers 18 --model-parallel-size 2 --sequence-parallel", 4),
        pytest.param(f"{PIPELINE} --num-layers 20 --pipeline-schedule zero-bubble", 2, marks=pytest.mark.wide),
    ],
)
def test_parts_add_up_and_few_layers_stand_for_all(flags: str, ranks: int):
    """The layers are so wide that each layer needs a kernel to add its gradients to the buckets. Several narrow layers
    share a kernel, which only a trace of all layers can count."""
    inputs = gpu_inputs(f"{flags} --hidden-size 2048 --num-attention-heads 16", ranks)
    whole, extended = (simulate(inputs, cluster(), record=record) for record in (True, False))
    assert extended.seconds == pytest.approx(whole.seconds, rel=0.01)
    for step in (whole, extended):
        assert sum(step.parts.values()) == pytest.approx(step.seconds)
    assert whole.parts["compute"] == pytest.approx(seconds_of(whole, "compute") / inputs.stages)


@pytest.mark.parametrize(
    "flags",
    [
        "",
        pytest.param("--num-layers-per-virtual-pipeline-stage 1", marks=pytest.mark.wide),
        pytest.param("--pipeline-schedule zero-bubble", marks=pytest.mark.wide),
    ],
)
def test_pipeline_takes_as_long_as_its_timetable(flags: str):
    """On this machine every kernel takes a second, and launches and messages take no time."""
    free = dict.fromkeys(("matmul_flops", "memory_bandwidth", "send", "network_send"), 1e30)
    machine = cluster(**free, launch=1e-30, send_latency=1e-30, kernel=1.0)
    inputs = gpu_inputs(f"{PIPELINE} --num-layers 8 {flags}", 2)
    schedule = inputs.config.pipeline_schedule(16)
    jobs = [stage_jobs(inputs, machine, stage) for stage in range(2)]

    def seconds(stage: int, kind: Kind) -> float:
        return sum(job.seconds for job in jobs[stage % 2].actions.get((kind, stage // 2, 0), ()))

    costs = [
        ActionCosts(*(seconds(stage, kind) for kind in ("F", "B", "W"))) for stage in range(schedule.num_virtual_stages)
    ]
    ends = sum(job.seconds for job in (*jobs[0].before, *jobs[0].after) if job.queue == "compute")
    assert simulate(inputs, machine, record=True).seconds == pytest.approx(
        timetable(schedule, costs).length + ends, rel=0.03
    )


def test_stages_share_cores() -> None:
    """Two stages on one core work in turn, without a bubble. On two machines each core also has two ranks
    (`ranks_per_core`), so a stage gets half of a core."""
    inputs = dataclasses.replace(gpu_inputs(f"{PIPELINE} --num-layers 4", 2), device="cpu")
    # Each kernel takes a second, and messages take no time.
    free = dict.fromkeys(("matmul_flops", "memory_bandwidth", "send", "network_send"), 1e30)

    def step(**changes: Any) -> StepTime:
        return simulate(inputs, cluster(**free, send_latency=1e-30, kernel=1.0, **changes), record=True)

    unshared = step()
    work = seconds_of(unshared, "compute")
    assert unshared.seconds < 0.95 * work
    assert step(ranks_per_core=2.0).seconds == pytest.approx(work, rel=0.02)
    assert step(ranks_per_core=2.0, gpus_per_node=1).seconds == pytest.approx(2 * unshared.seconds)


def test_bad_files_of_clusters_are_one_line(tmp_path: Path):
    content, path = json.loads((ROOT / "clusters/cpu.json").read_text()), tmp_path / "bad.json"
    for change, message in (
        ({"link": 0}, "link in .* must be a positive number, not 0"),
        ({"lnik": 1}, "does not describe a cluster: .*lnik"),
        ({"collectives": {collective_key("send", 2, 1): [[1, 1, 1]]}}, "a collective needs at least two sizes"),
    ):
        path.write_text(json.dumps({"cluster": content["cluster"] | change}))
        with pytest.raises(ValueError, match=message):
            read_cluster(str(path))


def test_a_measured_machine(tmp_path: Path, python: WarmPython, capsys: pytest.CaptureFixture[str]):
    """bench_kernels writes a file with two ranks, and the plan reads it."""
    path = tmp_path / "machine.json"
    words = f"tools/bench_kernels.py --nproc-per-node 2 --rounds 1 --seconds 0.001 --output {path}"
    subprocess.run([python.python, *words.split()], check=True, cwd=ROOT, timeout=100)
    measured, _ = read_cluster(str(path))
    names = ("all_reduce", "all_gather", "reduce_scatter", "send")
    assert set(measured.collectives) == {collective_key(name, ranks=2, nodes=1) for name in names}
    assert measured.measured("send", 8 << 20, 2, 1)[0] > 0
    assert 1e8 < measured.matmul_flops < 1e14 and measured.gpus_per_node == 2
    flags = f"{SHAPE} 2 --device cpu --tokenizer-type bytes --attention-dropout 0 --hidden-dropout 0 --ranks 2"
    assert main([*flags.split(), "--model-parallel-size", "2", "--cluster", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["time"]["shares"]["tensor"] > 0


def test_gradients_are_summed_under_backward() -> None:
    inputs = gpu_inputs(f"{SHAPE} 6 --micro-batch-size 8 --use-distributed-optimizer --ddp-bucket-size 1000000", 8)
    step = simulate(inputs, cluster(), record=True)
    assert 0 < step.parts["data"] < seconds_of(step, "data")
    sent = sum(int(s.text.split()[0].replace(",", "")) for s in step.spans if s.queue == "data")
    parameters = inputs.config.model.num_layers * 12 * 512**2 + 50304 * 512
    assert sent == pytest.approx(6 * parameters, rel=0.02)  # 4 bytes of each gradient, and 2 bytes of each new weight


def test_interval_between_checkpoints_is_the_best() -> None:
    cost = training_cost(3e11, 1e6, 512, 64, 0.004, 60, 600)
    intervals = np.geomspace(600, 1e5, 2000)
    lost = 60 / intervals + (intervals / 2 + 600) * 0.004 * 64 / DAY
    assert cost.interval == pytest.approx(intervals[np.argmin(lost)], rel=0.01)
    assert cost.days == pytest.approx(3e5 / DAY * (1 + lost.min()), rel=1e-4)


def test_search_finds_layouts_that_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    flags = f"{SHAPE} 4 --device cuda --cluster a100 --ranks 4 --global-batch-size 8".split()
    assert main([*flags, *"--search --tokens 1B --memory-gb 1.1 --json".split()]) == 0
    found = json.loads(capsys.readouterr().out)["found"]
    assert len(found) >= 5
    assert [row["seconds"] for row in found] == sorted(row["seconds"] for row in found)
    # The plan of the first layout gives the same numbers as the search.
    path = tmp_path / "step.json"
    assert main([*flags, *found[0]["flags"].split(), "--perfetto", str(path), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["memory"]["total"] == found[0]["bytes"] <= 1.1 * 2**30
    assert plan["time"]["seconds"] == pytest.approx(found[0]["seconds"], rel=0.01)
    events = json.loads(path.read_text())["traceEvents"]
    assert 0 < max(event["ts"] for event in events) < 1e6 * plan["time"]["seconds"]


def test_the_page_of_a_real_step(tmp_path: Path):
    """The page shows the outermost operators of the profiler's trace, with their shapes."""
    path, page = tmp_path / "profile.json.gz", tmp_path / "step.html"
    with profile(record_shapes=True) as profiled:
        torch.nn.functional.linear(torch.ones(2, 3), torch.ones(4, 3))
    profiled.export_chrome_trace(str(path))
    show_step(["--traces", str(path), "--output", str(page)])
    match = re.search(r'type="application/json">(.*)</script>', page.read_text(encoding="utf-8"))
    assert match
    spans = json.loads(match[1])["spans"]
    assert [span[:3] + span[5:] for span in spans if span[2] != "aten::ones"] == [
        [0, "compute", "aten::linear", "[2, 3] × [4, 3]"]
    ]


def test_the_page_of_a_step_in_a_browser(tmp_path: Path):
    path = tmp_path / "step.html"
    flags = f"{SHAPE} 2 --device cuda --cluster a100 --ranks 4 --pipeline-model-parallel-size 2"
    show_step([*flags.split(), *"--model-parallel-size 2 --global-batch-size 16 --output".split(), str(path)])
    with open_page() as (api, page, errors):
        page.goto(path.as_uri())
        running, pictures = page.locator("#running"), [page.locator("#lanes").screenshot()]
        first = running.inner_text()
        page.get_by_role("button", name="Next").click()
        assert running.inner_text() != first
        page.locator("#zoom").select_option("0.1")
        spans = page.evaluate("spans")
        starts = sorted({span[3] for span in spans})
        for queue in ("tensor", "pipeline"):
            span = next(span for span in spans if span[1] == queue)
            page.locator("#moment").fill(str(starts.index(span[3])))
            for text in span[2], span[5]:
                api.expect(running).to_contain_text(text)
            pictures.append(page.locator("#lanes").screenshot())
        assert len(set(pictures)) == 3 and errors == []
