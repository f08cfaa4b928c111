"""The modelled time of a training step on a described cluster, from traces of the program.

One rank of each kind of pipeline stage is traced: first, middle and last. An action is the forward pass, the backward
pass or the weight gradients of a micro-batch in a model chunk. The events of a trace are divided into actions, and each
stage repeats them in the order of its schedule, with its messages. A stage has these queues:

- the host, which launches kernels and collectives one after the other
- compute, which runs kernels in order, each after its launch
- one for each communicator. A collective starts after the kernels before it. A wait in the program stops compute until
  its collective has ended.

On a CPU the host computes without launches, and a measured collective occupies the host for a part of its time. If
ranks share cores, a kernel takes longer while other stages of its machine compute. All ranks of a stage are equally
fast.

Left out: torch.compile; the slower kernels while a collective runs on a GPU; contention of groups for the network,
unless it was measured; differences between ranks; loading of data; dropout on a CPU; waits of the collectives that
ranks of several stages share, since these come at the end of the step.

Times are in seconds.
"""

import functools
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from megatron.gpt2.extensions.plan.cluster import Cluster
from megatron.gpt2.extensions.plan.memory import MemoryInputs, trace_stage, with_few_layers
from megatron.gpt2.extensions.plan.process_group import Wait
from megatron.gpt2.extensions.plan.trace import Communication, Event, Mark, Operation
from megatron.gpt2.pipeline.p2p_schedule import P2PMessage, build_p2p_schedule, input_message
from megatron.gpt2.pipeline.schedule import Action, Kind

PARTS = ("compute", "launch", "tensor", "data", "other", "pipeline")
FORWARD_PRODUCTS, BACKWARD_PRODUCTS = 2, 5  # matrix products of fused attention, which recomputes the scores.
CAUSAL = 0.5  # The share of the scores that causal attention computes.
READS_ROWS = ("embedding", "index_select", "gather")  # The operators that read only a part of their first tensor.
FUNCTIONS = {"gelu": 1, "gelu_backward": 2, "exp": 1, "exp_": 1}  # exponentials for each element
# the kind, the model chunk, and 1 for the last micro-batch of a step or 0 for any other
TracedAction = tuple[Kind, int, int]


class QueueSpan(NamedTuple):
    """A kernel, a collective, a message or a wait of the first rank of `stage`.

    queue: "compute" or a kind of communication.
    text: shapes or bytes, and the line of the program.
    """

    stage: int
    queue: str
    name: str
    start: float
    end: float
    text: str


@dataclass(frozen=True)
class StepTime:
    """The modelled time of a step.

    parts: the mean over stages of what compute does or waits for, which add up to `seconds`: "compute", "launch" (waits
        for the host), "tensor", "data", "other" (waits for collectives of these groups) and "pipeline" (waits for other
        stages: bubble and messages).
    spans: the spans of all stages, or none if `simulate` was called without `record`.
    """

    seconds: float
    parts: Mapping[str, float]
    spans: Sequence[QueueSpan] = ()

    def extended(self, fewer: "StepTime", steps: float) -> "StepTime":
        """Extrapolate: return this time plus `steps` times its difference to the time of `fewer` layers or
        micro-batches."""
        parts = {name: value + steps * (value - fewer.parts[name]) for name, value in self.parts.items()}
        return StepTime(self.seconds + steps * (self.seconds - fewer.seconds), parts)


class Job(NamedTuple):
    """An event of a trace with its time.

    queue: "compute", a kind of communication, or "" for a wait.
    number: `Call.number`, which connects a wait with the call that it waits for.
    group: the ranks of the collective's communicator.
    busy: seconds in which a collective occupies the processor that computes.
    """

    queue: str
    name: str
    seconds: float
    number: int
    group: tuple[int, ...]
    text: str
    busy: float = 0.0


@dataclass(frozen=True)
class StageJobs:
    """The jobs of a stage: before the first action, of each action, and after the last one."""

    before: list[Job]
    actions: dict[TracedAction, list[Job]]
    after: list[Job]


def kernel_seconds(cluster: Cluster, event: Operation) -> float:
    """Return the time of a kernel. The time of a matrix product depends on its sizes, and the time of another kernel on
    its bytes and, on a CPU, on its exponentials."""
    name, shapes = event.name, event.shapes
    if name in ("mm", "bmm", "addmm", "addmm_"):
        a, b = shapes[1:3] if name.startswith("addmm") else shapes[:2]
        seconds = cluster.matmul(a[-2], b[-1], a[-1], math.prod(a[:-2]))
    elif "_attention" in name:
        is_backward = "backward" in name
        *outer, s, head_size = shapes[1 if is_backward else 0]
        products = BACKWARD_PRODUCTS if is_backward else FORWARD_PRODUCTS
        seconds = cluster.attention * CAUSAL * products * cluster.matmul(s, s, head_size, math.prod(outer))
    else:
        seconds = cluster.move(2 * event.written if name in READS_ROWS else event.read + event.written)
        seconds += cluster.function * FUNCTIONS.get(name, 0) * math.prod(shapes[0] if shapes else ())
    return event.times * float(seconds + cluster.kernel)


def kind_of_group(inputs: MemoryInputs, ranks: Sequence[int]) -> str:
    """Return "tensor", "data" or "other" for the ranks of a communicator."""
    size_and_stride, tensor = (len(ranks), ranks[1] - ranks[0]), inputs.config.parallel.tensor_model_parallel_size
    kinds = {(inputs.data_parallel_size, tensor): "data", (tensor, 1): "tensor"}
    return kinds.get(size_and_stride, "other")


def collective_seconds(cluster: Cluster, event: Communication, kind: str) -> tuple[float, float]:
    """Return the time of a collective, and for how long it occupies the processor that computes."""
    ranks = event.ranks
    nodes = len({rank // cluster.gpus_per_node for rank in ranks})
    if measured := cluster.measured(event.name, event.size, len(ranks), nodes):
        return measured
    link = cluster.link if kind == "tensor" else cluster.data_link
    whole = float(cluster.all_reduce(event.size, len(ranks), ranks[1] - ranks[0], link=link))
    return whole if event.name == "all_reduce" else whole / 2, 0.0


def _jobs(inputs: MemoryInputs, cluster: Cluster, events: Sequence[Event]) -> list[Job]:
    seconds = functools.lru_cache(maxsize=None)(lambda event: kernel_seconds(cluster, event))
    jobs = []
    for event in events:
        if isinstance(event, Operation):
            shapes = " × ".join(map(str, map(list, event.shapes[:3])))
            jobs.append(Job("compute", event.name, seconds(event), -1, (), f"{shapes} {event.place}"))
        elif isinstance(event, Communication) and event.name not in ("send", "recv") and len(event.ranks) > 1:
            kind = kind_of_group(inputs, event.ranks)
            text = f"{event.size:,} bytes, {len(event.ranks)} ranks {event.place}"
            time, busy = collective_seconds(cluster, event, kind)
            jobs.append(Job(kind, event.name, time, event.number, event.ranks, text, busy))
        elif isinstance(event, Wait):
            jobs.append(Job("", "", 0.0, event.number, (), ""))
    return jobs


def stage_jobs(inputs: MemoryInputs, cluster: Cluster, stage: int) -> StageJobs:
    """Trace one or two micro-batches of the first rank of `stage`, and cut the trace into actions."""
    count = min(2, inputs.num_microbatches)
    pieces: list[list[Event]] = [[]]
    for event in trace_stage(inputs, stage, count).events:
        if isinstance(event, Mark) and event.phase in ("forward", "backward") and not event.ends:
            pieces.append([])
        pieces[-1].append(event)
    end = pieces[-1].index(Mark("backward", ends=True))
    pieces[-1:] = pieces[-1][:end], pieces[-1][end:]
    before, *actions, after = (_jobs(inputs, cluster, piece) for piece in pieces)
    schedule = inputs.config.pipeline_schedule(count)
    return StageJobs(
        before,
        {
            (action.kind, action.model_chunk, action.micro_batch): jobs
            for action, jobs in zip(schedule.ranks[stage], actions, strict=True)
        },
        after,
    )


class Lane:
    """The queues of one stage.

    now: the time at which compute is free.
    launch: the host's seconds per kernel; 0 on a CPU.
    resumed: the end of its last wait.
    is_blocked: the stage waits for a message whose time is not known yet, or its step has ended.
    """

    def __init__(self, stage: int, launch: float, spans: list[QueueSpan] | None) -> None:
        self.stage, self.now, self.launch, self.resumed, self.is_blocked = stage, 0.0, launch, 0.0, False
        self.parts = dict.fromkeys(PARTS, 0.0)
        self._host, self._spans = 0.0, spans
        self._queues = defaultdict[tuple[int, ...], float](float)
        # by `Call.number`: the end and the kind of a collective that runs
        self._running: dict[int, tuple[float, str]] = {}

    def wait(self, end: float, part: str) -> None:
        """Let the compute queue wait until `end`."""
        if end > self.now:
            self.parts[part] += end - self.now
            self.now = self.resumed = end

    def occupy(self, seconds: float, part: str) -> None:
        """Let the processor work for `seconds`."""
        self.parts[part] += seconds
        self.now += seconds

    def is_active(self, time: float) -> bool:
        """Return whether the processor is busy at `time`."""
        return not self.is_blocked and self.resumed <= time

    def record(self, queue: str, name: str, start: float, end: float, text: str) -> None:
        """Add a span, if spans are recorded."""
        if self._spans is not None:
            self._spans.append(QueueSpan(self.stage, queue, name, start, end, text))

    def run(self, jobs: Sequence[Job], slowdown: Callable[["Lane"], float] | None) -> Iterator[None]:
        """Run jobs in the queues.

        slowdown: returns the factor by which a kernel that starts now is slower. With `slowdown`, the function yields
            after each kernel, so that other stages run until the same time.
        """
        for job in jobs:
            factor = 1.0 if slowdown is None else slowdown(self)
            if not job.queue:
                if job.number in self._running:
                    self.wait(*self._running.pop(job.number))
                continue
            self._host += self.launch
            if job.queue == "compute":
                self.wait(self._host, "launch")
                start = self.now
                self.occupy(factor * job.seconds, "compute")
                end = self.now
            else:
                start = max(self._queues[job.group], self.now, self._host)
                end = self._queues[job.group] = start + job.seconds
                self._running[job.number] = end, job.queue
                self.occupy(factor * job.busy, job.queue)
            self.record(job.queue, job.name, start, end, job.text)
            if slowdown is not None:
                yield

    def finish(self, first_forward: float) -> None:
        """Wait for collectives that still run at the end of a step: they gather parameters for the next step. Its
        first forward pass needs the result of the first collective at the start, and that of the last collective before
        its last layer."""
        ends = sorted(end for end, _ in self._running.values())
        if ends:
            self.wait(max(ends[0], ends[-1] - first_forward), "data")


def simulate(inputs: MemoryInputs, cluster: Cluster, *, record: bool = False) -> StepTime:
    """Return the modelled time of a step.

    If a model has many layers, or a step many micro-batches, only few are simulated, since the time of a step is linear
    in both numbers. If the host launches kernels ahead of the device for few layers but not for all layers, the result
    is too short (by 6 % in a small model). Raises ValueError if the ranks cannot share the batch.

    record: whether to simulate all layers and micro-batches, and to keep the spans of all stages.
    """
    found = None if record else with_few_layers(inputs)
    if found is None:
        return _simulate(inputs, cluster, record)
    (_, fewer, few), steps = found
    return _simulate(few, cluster, False).extended(_simulate(fewer, cluster, False), steps)


def _simulate(inputs: MemoryInputs, cluster: Cluster, record: bool) -> StepTime:
    p, m, layers = inputs.stages, inputs.num_microbatches, inputs.config.layers_of_virtual_stages()

    kinds: dict[tuple[object, ...], StageJobs] = {}
    jobs = []
    for stage in range(p):
        kind = stage == 0, stage == p - 1, *map(len, layers[stage::p])
        if kind not in kinds:
            kinds[kind] = stage_jobs(inputs, cluster, stage)
        jobs.append(kinds[kind])
    if record or m <= 3 * p + 1:
        return _run_stages(inputs, cluster, jobs, m, record)
    first = 2 * p + m % p
    fewer, more = (_run_stages(inputs, cluster, jobs, count, False) for count in (first, first + p))
    return more.extended(fewer, (m - first - p) / p)


def _run_stages(
    inputs: MemoryInputs, cluster: Cluster, jobs: Sequence[StageJobs], num_microbatches: int, record: bool
) -> StepTime:
    config, pp, of_stage = inputs.config, inputs.stages, inputs.world_size // inputs.stages
    tp = config.parallel.tensor_model_parallel_size
    schedule = config.pipeline_schedule(num_microbatches)
    steps = build_p2p_schedule(schedule)
    tokens = config.train.micro_batch_size * config.data.seq_length
    size = inputs.dtype.itemsize * tokens * config.model.hidden_size // (tp if config.parallel.sequence_parallel else 1)
    posted: dict[tuple[P2PMessage, int], float] = {}  # the time at which a rank is ready to send or receive a message
    spans: list[QueueSpan] = []
    launch = float(cluster.host(1, tp)) if inputs.device == "cuda" else 0.0
    lanes = [Lane(stage, launch, spans if record else None) for stage in range(pp)]

    def shared(lane: Lane) -> float:
        """Return the factor by which a stage becomes slower because other stages of its node compute."""
        near = [other for other in lanes if node_of(other.stage) == node_of(lane.stage)]
        return max(1.0, cluster.ranks_per_core * sum(other.is_active(lane.now) for other in near) / len(near))

    slowdown = shared if cluster.ranks_per_core > 1 else None

    def node_of(stage: int) -> int:
        return stage * of_stage // cluster.gpus_per_node

    @functools.cache
    def exchanged(message: P2PMessage) -> float:
        """Return the time at which a message arrives. A message starts when both ranks are ready."""
        ends = ends_of(message)
        nodes = set(map(node_of, ends))
        start = max(posted[message, rank] for rank in ends)
        measured = cluster.measured("send", size, inputs.world_size, len(nodes))
        end = start + (measured[0] if measured else float(cluster.point_to_point(size, len(nodes) > 1)))
        lanes[message.destination].record("pipeline", message.kind, start, end, f"{size:,} bytes, {message}")
        return end

    def run(stage: int) -> Iterator[None]:
        lane, jobs_of_stage, sent = lanes[stage], jobs[stage], list[P2PMessage]()
        batch_of: dict[P2PMessage, list[P2PMessage]] = {}

        def wait(batch: list[P2PMessage]) -> Iterator[None]:
            lane.is_blocked = True
            while any((message, rank) not in posted for message in batch for rank in ends_of(message)):
                yield
            lane.is_blocked = False
            lane.wait(max(map(exchanged, batch), default=0.0), "pipeline")

        yield from lane.run(jobs_of_stage.before, slowdown)
        for step in steps[stage]:
            if batch := [*step.sends, *step.receives]:
                yield from wait(sent)
                sent = batch if step.sends else []
                posted.update({(message, stage): lane.now for message in batch})
                # With gloo the program waits for each message, with NCCL for all messages of a batch.
                batch_of |= {message: [message] if inputs.device == "cpu" else batch for message in step.receives}
            if (action := step.action) is not None:
                if message := input_message(schedule, stage, action):
                    yield from wait(batch_of.pop(message))
                yield from lane.run(jobs_of_stage.actions[_traced(action, num_microbatches)], slowdown)
        yield from wait(sent)
        yield from lane.run(jobs_of_stage.after, slowdown)
        lane.finish(sum(job.seconds for job in jobs_of_stage.actions["F", 0, 0] if job.queue == "compute"))
        lane.is_blocked = True

    running = {lane: run(lane.stage) for lane in lanes}
    while running:
        for lane in sorted(running, key=lambda lane: lane.now):
            if next(running[lane], running) is running:
                del running[lane]
            elif slowdown and not lane.is_blocked:
                break
    seconds = max(lane.now for lane in lanes)
    for lane in lanes:
        lane.wait(seconds, "pipeline")
    parts = {name: sum(lane.parts[name] for lane in lanes) / pp for name in PARTS}
    return StepTime(seconds, parts, spans)


def ends_of(message: P2PMessage) -> tuple[int, int]:
    """Return the sender and the receiver of a message."""
    return message.source, message.destination


def _traced(action: Action, num_microbatches: int) -> TracedAction:
    is_last = num_microbatches > 1 and action.micro_batch == num_microbatches - 1
    return action.kind, action.model_chunk, int(is_last)


def write_perfetto(step: StepTime, path: Path) -> None:
    """Write a trace that https://ui.perfetto.dev and chrome://tracing show: a process for each stage, a thread for each
    queue, times in microseconds."""
    events = [
        {
            "name": span.name,
            "ph": "X",
            "pid": span.stage,
            "tid": span.queue,
            "ts": 1e6 * span.start,
            "dur": 1e6 * (span.end - span.start),
            "args": {"details": span.text},
        }
        for span in step.spans
    ]
    path.write_text(json.dumps({"traceEvents": events}), encoding="utf-8")
