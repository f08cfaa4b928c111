"""Compare modelled with measured times of a training step.

    python benchmarks/step_times.py measured.csv --cluster a100          # errors, worst rows, how often intervals hold
    python benchmarks/step_times.py --published                          # tables of three papers
    python benchmarks/step_times.py one_node.csv many_nodes.csv --fit    # fit clusters/*.json (scipy; minutes)

The programs of the rows are not this project: their attention stores its scores, and they sum gradients after the
backward pass. `step_seconds` computes their steps with the formulas for kernels, collectives and launches of
`megatron/gpt2/extensions/plan/cluster.py`, which this project's planner uses too. The rows so test the constants of a
machine and its formulas. The planner's own times come from traces.

The results are printed as JSON.
A row of the CSV file is one configuration: gpus, global_batch, micro_batch, hidden_size, attention_heads, layers,
sequence_length, tensor_parallel, data_parallel, pipeline_parallel, ms_per_iteration. A constant in `clusters/*.json`
belongs to a machine, to a program, or to a shape of a layer on one rank (see `layer_shapes`), not to a row. With --fit,
the program prints the errors of rows that the fit has not seen: five parts at random, each model in turn, and five
parts of the groups in which the model chooses a layout.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # The project need not be installed.

from megatron.gpt2.extensions.plan.cluster import ROOT, Cluster, read_cluster

VOCAB_SIZE = 50257
HALF = 2  # bytes of a 16-bit number


@dataclass(frozen=True)
class Software:
    """A Megatron-style program.

    kernels: number of kernels that the host launches in the forward pass of a layer.
    traffic: bytes of element-wise kernels, relative to the bytes in `step_seconds`.
    recompute: "full" or "selective" (attention).
    sequence_parallel: norms and dropout are split.
    softmax_heads: the fused softmax runs only if this number divides the samples × heads of a rank; otherwise
        `unfused_kernels` more are launched.
    backward_kernels: number of kernels of the backward pass relative to the forward pass.
    head_kernels: the kernels of embedding, head and loss.
    loss_bytes: bytes that the loss moves per logit.
    odd_vocabulary: time of a product with the vocabulary relative to other products, without tensor parallelism.
        Without padding, `odd_vocabulary` is above 1, because kernels are slower for the odd number of columns (50,257).
    score_traffic: `traffic` of the attention scores, relative to that of other element-wise kernels.
    product_time: time of matrix products relative to the cluster's constants, because libraries become faster.
    one_node: time of matrix products on one node relative to several nodes. The rows on one node look like sums of
        layers that were timed one by one, which keeps clocks high.
    gradient_bytes: per parameter and micro-batch, for the sum of gradients.
    split_sends: the ranks of a tensor-parallel group share the transfer between stages.
    shape_factors: measured time of a step relative to the formulas, by the shape of a layer on one rank (see
        `layer_shapes`). Steps with the same shape are slower or faster than the formulas by the same share of up to
        20 %, whatever the number of GPUs and layers.
    """

    kernels: float
    traffic: float
    recompute: str = "full"
    sequence_parallel: bool = False
    softmax_heads: int = 4
    unfused_kernels: float = 25.0
    backward_kernels: float = 1.0
    head_kernels: float = 85.0
    loss_bytes: float = 90.0
    odd_vocabulary: float = 1.0
    score_traffic: float = 1.0
    product_time: float = 1.0
    one_node: float = 1.0
    gradient_bytes: float = 8.0
    split_sends: bool = False
    shape_factors: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Layouts:
    """Rows of a file. Each field is an array with one element per row. `num_model_chunks` counts chunks of a rank."""

    global_batch: Any
    micro_batch: Any
    hidden_size: Any
    attention_heads: Any
    layers: Any
    sequence_length: Any
    tensor_parallel: Any
    data_parallel: Any
    pipeline_parallel: Any
    num_model_chunks: Any = 1

    @property
    def gpus(self) -> Any:
        """The number of GPUs."""
        return self.tensor_parallel * self.data_parallel * self.pipeline_parallel


def layer_shapes(x: Layouts) -> list[str]:
    """Return the shape of a layer on one rank for each row, such as "h 1024, s 1024, t 2, b 4"."""
    columns = np.broadcast_arrays(x.hidden_size, x.sequence_length, x.tensor_parallel, x.micro_batch)
    return [f"h {h:.0f}, s {s:.0f}, t {t:.0f}, b {b:.0f}" for h, s, t, b in zip(*columns, strict=True)]


def step_seconds(cluster: Cluster, software: Software, x: Layouts) -> Any:
    """Return the time of a step in seconds."""
    b, s, h, t, p, d = (
        x.micro_batch,
        x.sequence_length,
        x.hidden_size,
        x.tensor_parallel,
        x.pipeline_parallel,
        x.data_parallel,
    )
    tokens, heads = b * s, b * x.attention_heads / t
    multi_node = x.gpus > cluster.gpus_per_node
    product_time = software.product_time * np.where(multi_node, 1.0, software.one_node)

    def matmul(m: Any, n: Any, k: Any, batch: Any = 1) -> Any:
        return product_time * cluster.matmul(m, n, k, batch)

    # The times of one layer are those of products with weights, of attention, and of element-wise kernels.
    sizes = ((3 * h / t, h), (h, h / t), (4 * h / t, h), (h, 4 * h / t))  # [out, in] of qkv, projection, MLP
    forward = sum(matmul(tokens, out, inner) for out, inner in sizes)
    backward = sum(matmul(tokens, inner, out) + matmul(out, inner, tokens) for out, inner in sizes)
    head_size = h / x.attention_heads
    score_bytes, row_bytes = heads * s * s * HALF, tokens * h * HALF
    # Sequence parallelism splits norms, dropout and residual sums by this number.
    split = t if software.sequence_parallel else 1
    scores = cluster.move(software.traffic * software.score_traffic * score_bytes)  # the time of one read or write
    # A product of unfused attention takes at least as long as reading or writing its scores.
    attention = np.maximum(
        matmul(s, s, head_size, heads) + matmul(s, head_size, s, heads), cluster.move(2 * score_bytes)
    )
    forward = forward + attention + 6 * scores + cluster.move(software.traffic * row_bytes * (14 / split + 14 / t))
    backward = (
        backward
        + 2 * attention
        + 5 * scores
        + cluster.move(software.traffic * row_bytes * (16 / split + 18 / t))
        + cluster.move(software.gradient_bytes * 12 * h * h / t)
    )
    # Each pass has two all-reduces.
    reduce = 2 * (t > 1) * cluster.all_reduce(row_bytes, t, link=cluster.link)
    kernels = software.kernels + np.where(heads % software.softmax_heads, software.unfused_kernels, 0.0)
    host = cluster.host(kernels, t)
    starts = kernels * cluster.kernel  # on the GPU
    full = np.maximum(forward + starts + reduce, host)
    back = np.maximum(backward + reduce + software.backward_kernels * starts, software.backward_kernels * host)
    again = full if software.recompute == "full" else attention + 6 * scores
    layers_of_stage = x.layers / p
    stage = layers_of_stage * (full + back + again)

    # The following times are those of the embedding, the head and the loss.
    vocab = np.ceil(VOCAB_SIZE / (128 * t)) * 128 * t
    table_gradient = cluster.move(software.gradient_bytes * vocab * h / t)
    head_products = matmul(tokens, vocab / t, h) + matmul(tokens, h, vocab / t) + matmul(vocab / t, h, tokens)
    head_gpu = (
        head_products * np.where(t > 1, 1, software.odd_vocabulary)
        + cluster.move(software.loss_bytes * tokens * vocab / t)
        + software.head_kernels * cluster.kernel
        + reduce / 2
    )
    head = np.maximum(head_gpu, cluster.host(software.head_kernels, t)) + table_gradient
    embedding = cluster.move(30 * row_bytes) + reduce / 2 + table_gradient

    # 1F1B: a step takes as long as the slowest stage needs for all micro-batches, plus the time until the pipeline is
    # full.
    micro_batches = x.global_batch / d / b
    crosses_nodes = multi_node & (t * d >= cluster.gpus_per_node)
    message = row_bytes / (t if software.split_sends else 1)
    send = (p > 1) * 2 * cluster.point_to_point(message, crosses_nodes)
    ends = np.where(p > 1, np.maximum(head, embedding), head + embedding)
    parameters = layers_of_stage * 12 * h * h / t + vocab * h / t
    data_parallel = (d > 1) * cluster.all_reduce(HALF * parameters, d, t, link=cluster.data_link)
    tied = (p > 1) * HALF * vocab * h / t / np.where(multi_node, cluster.network, cluster.data_link)
    formula = (
        micro_batches * (stage + ends)
        + (p - 1) * stage / x.num_model_chunks
        + send * (micro_batches * x.num_model_chunks + p - 1)
        + data_parallel
        + tied
        + cluster.step
        + cluster.adam * parameters
    )
    return formula * np.array([software.shape_factors.get(shape, 1.0) for shape in layer_shapes(x)])


COLUMNS = [field.name for field in fields(Layouts)][:-1]  # A CSV file has no model chunks.
PROGRAM = "megatron_deepspeed"  # The CSV files have this name of the program.
WORST = 0.05  # The report lists this share of the rows, those with the largest errors.
INTERVAL = 0.8  # An interval should contain this share of the rows.
# The prior of each fitted constant is its value, and the factor by which the value may differ.
PRIORS = {
    "matmul_flops": (250e12, 1.1),
    "half_m": (150, 2),
    "half_n": (60, 2),
    "half_k": (60, 2),
    "memory_bandwidth": (1.4e12, 1.1),
    "kernel": (5e-6, 1.3),
    "launch": (14e-6, 1.3),
    "launch_growth": (0.06, 2),
    "hop": (20e-6, 3),
    "link": (230e9, 1.2),
    "data_link": (230e9, 1.5),
    "network": (10e9, 2),
    "network_hop": (30e-6, 3),
    "send": (50e9, 2),
    "send_latency": (50e-6, 2),
    "network_send": (10e9, 2),
    "step": (1e-3, 3),
    "adam": (2e-11, 1.3),
}
NOISE = 0.04  # The fit expects this relative error of a row.
# Each of `shape_factors` is a mean over the measured rows of a shape and this number of rows without an error. A shape
# with few rows so stays near the formula.
FORMULA_ROWS = 1
TABLE_WEIGHT = 4.0  # weight of a row of a published table, because few rows stand for a program
SOFTWARE_PRIORS = {
    "unfused_kernels": (25, 1.3),
    "backward_kernels": (1, 1.2),
    "head_kernels": (85, 1.5),
    "loss_bytes": (30, 1.2),
    "gradient_bytes": (6, 1.5),
}
# the constants of the program of the CSV files
CSV_PRIORS = {
    "kernels": (65.0, 1.2),
    "traffic": (1.0, 1.5),
    "score_traffic": (1.0, 1.5),
    "odd_vocabulary": (3, 1.2),
    "one_node": (0.85, 1.1),
}
GENERATION_PRIORS = {"product_time": (1, 1.2), "traffic": (1, 1.5)}
# A machine keeps these of its own constants. Its others are those of a100.json.
OWN = {"selene": ("network", "network_send"), "v100": ("memory_bandwidth",)}
V100_PRIORS = {"matmul_flops": (90e12, 1.2), "link": (100e9, 1.3)}

Rows = tuple[Layouts, np.ndarray]  # rows and their measured seconds


def read_rows(paths: Sequence[Path]) -> Rows:
    """Read measured rows. Raises ValueError that names the file if a column is missing or is not a number."""
    values: dict[str, list[float]] = {name: [] for name in [*COLUMNS, "ms_per_iteration"]}
    for path in paths:
        with path.open(newline="", encoding="utf-8") as file:
            for number, row in enumerate(csv.DictReader(file), start=2):
                try:
                    for name, column in values.items():
                        column.append(float(row[name]))
                except (KeyError, TypeError, ValueError) as error:
                    raise ValueError(f"{path}, line {number}: {name} is missing or is not a number") from error
    measured = np.array(values.pop("ms_per_iteration")) / 1e3
    return Layouts(**{name: np.array(column) for name, column in values.items()}), measured


def select(rows: Rows, chosen: np.ndarray) -> Rows:
    """Return the rows with these indices, or the rows for which a boolean array is True."""
    layouts, measured = rows
    taken = {name: np.asarray(value)[chosen] for name, value in vars(layouts).items() if np.ndim(value)}
    return replace(layouts, **taken), measured[chosen]


def one_node(cluster: Cluster, rows: Rows) -> np.ndarray:
    return np.asarray(rows[0].gpus <= cluster.gpus_per_node)


def models(rows: Rows) -> np.ndarray:
    """Return a number for each row. Rows of the same model get the same number."""
    return np.asarray(rows[0].hidden_size) * 1000 + rows[0].layers


def choices(rows: Rows) -> np.ndarray:
    """Return a number for each row. Rows of the same model, number of GPUs and global batch get the same number."""
    x = rows[0]
    keys = np.stack([models(rows), x.sequence_length, x.gpus, x.global_batch], axis=1)
    return np.unique(keys, axis=0, return_inverse=True)[1].ravel()


# --- published tables ------------------------------------------------------------------------------------------------

# The table of the README of Megatron-LM in 2020, for one node: layers, hidden size, heads, tensor-parallel size, ms on
# V100 (batch 8) and A100 (16).
TABLE_2020 = [
    (24, 1920, 15, 1, 1121, 1076),
    (30, 2304, 18, 2, 1093, 1026),
    (36, 3072, 24, 4, 1238, 1162),
    (42, 4096, 32, 8, 1407, 1343),
]
# Table 1 of arXiv:2104.04473: hidden size, layers, heads, tensor-parallel size, GPUs, batch, TFLOP/s of a GPU, virtual
# stages. The paper does not give the virtual stages, so they are the largest number up to 4 that divides a stage's
# layers.
TABLE_2021 = [
    (2304, 24, 24, 1, 32, 512, 137, 1),
    (3072, 30, 32, 2, 64, 512, 138, 1),
    (4096, 36, 32, 4, 128, 512, 142, 1),
    (6144, 40, 48, 8, 256, 1024, 135, 1),
    (8192, 48, 64, 16, 512, 1536, 138, 4),
    (10240, 60, 80, 32, 1024, 1792, 140, 3),
    (12288, 80, 96, 64, 1536, 2304, 148, 2),
    (16384, 96, 128, 128, 1920, 2160, 155, 3),
    (20480, 105, 128, 280, 2520, 2520, 163, 3),
    (25600, 128, 160, 512, 3072, 3072, 163, 2),
]
# Table 5 of arXiv:2205.05198: hidden size, layers, heads, pipeline stages, virtual stages, batch, micro-batch, seconds
# with full recomputation, and with sequence parallelism and selective recomputation.
TABLE_2022 = [
    (6144, 48, 64, 1, 1, 4, 4, 1.42, 1.10),
    (12288, 96, 96, 8, 3, 64, 1, 18.13, 13.75),
    (20480, 105, 128, 35, 3, 280, 1, 49.05, 37.83),
    (25600, 128, 160, 64, 1, 512, 1, 94.42, 71.49),
]


@dataclass(frozen=True)
class Table:
    """A published table: the name of its cluster and of its program in `clusters/NAME.json`, its rows, and whether the
    micro-batch is unknown. If it is, the layout that is fastest in the model is compared."""

    title: str
    cluster: str
    program: str
    rows: Rows
    any_micro_batch: bool = False


def layouts(rows: Sequence[Sequence[float]]) -> Layouts:
    return Layouts(*map(np.array, zip(*rows, strict=True)))


def published() -> list[Table]:
    """Return the published tables."""
    tables = []
    for gpu, batch, column in (("v100", 8, 4), ("selene", 16, 5)):
        rows = [(batch, batch, h, n, depth, 1024, t, 1, 1, 1) for depth, h, n, t, *_ in TABLE_2020]
        seconds = np.array([row[column] / 1e3 for row in TABLE_2020])
        tables.append(Table(f"Megatron-LM, 2020, {gpu}", gpu, "megatron_2020", (layouts(rows), seconds)))
    rows, seconds_2021 = [], []
    for h, depth, n, model_parallel, gpus, batch, tflops, chunks in TABLE_2021:
        t = min(8, model_parallel)
        rows.append((batch, 1, h, n, depth, 2048, t, gpus // model_parallel, model_parallel // t, chunks))
        flops = 96 * batch * 2048 * depth * h * h * (1 + 2048 / (6 * h) + 51200 / (16 * depth * h))
        seconds_2021.append(flops / gpus / tflops / 1e12)
    made = (layouts(rows), np.array(seconds_2021))
    tables.append(Table("arXiv:2104.04473, table 1", "selene", "megatron_2021", made, any_micro_batch=True))
    rows = [(batch, b, h, n, depth, 2048, 8, 1, p, chunks) for h, depth, n, p, chunks, batch, b, *_ in TABLE_2022]
    for program, column in (("megatron_2022", 7), ("megatron_2022_selective", 8)):
        seconds = np.array([row[column] for row in TABLE_2022])
        tables.append(Table(f"arXiv:2205.05198, {program}", "selene", program, (layouts(rows), seconds)))
    return tables


# --- the fit ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Constants:
    """The constants of all clusters and programs, as read from `clusters/*.json`."""

    clusters: dict[str, Cluster]
    programs: dict[str, Software]


def software(content: Mapping[str, Any], name: str) -> Software:
    """Return the program `name` of a cluster's file. Programs share the constants under "all"."""
    return Software(**content["software"]["all"], **content["software"][name])


def read_constants() -> Constants:
    """Read the constants of the rows' cluster and of the published tables' clusters."""
    a100, content = read_cluster("a100")
    programs = {name: software(content, name) for name in content["software"] if name != "all"}
    return Constants({"a100": a100} | {name: read_cluster(name)[0] for name in ("selene", "v100")}, programs)


def csv_table(rows: Rows) -> Table:
    """Return the rows of the CSV files."""
    return Table("measured rows", "a100", PROGRAM, rows)


def relative_errors(constants: Constants, table: Table) -> np.ndarray:
    """Return modelled / measured seconds - 1 of each row."""
    cluster, program, (x, measured) = constants.clusters[table.cluster], constants.programs[table.program], table.rows
    if not table.any_micro_batch:
        return step_seconds(cluster, program, x) / measured - 1
    tries = []
    for size in (1, 2, 4, 8):
        seconds = step_seconds(cluster, program, replace(x, micro_batch=size))
        tries.append(np.where((x.global_batch / x.data_parallel) % size, np.inf, seconds))
    return np.min(tries, axis=0) / measured - 1


def fitted(base: Constants, rows: Rows, tables: Sequence[Table], steps: int = 4) -> Constants:
    """Return the constants that give the smallest sum of absolute relative errors over rows and tables, near their
    priors, and then `shape_factors` from the errors that remain on one node.

    Least squares are repeated with weights 1/|error|, which approaches the smallest absolute errors."""
    from scipy.optimize import least_squares  # type: ignore[import-untyped]

    generations = [name for name in base.programs if name not in (PROGRAM, "megatron_2022_selective")]
    owners: dict[str, Mapping[str, tuple[float, float]]] = {
        "a100": PRIORS,
        "all": SOFTWARE_PRIORS,
        **dict.fromkeys(generations, GENERATION_PRIORS),
    }
    owners |= {"v100": V100_PRIORS, PROGRAM: CSV_PRIORS}
    keys = [(owner, name) for owner, priors in owners.items() for name in priors]
    centre, spread = np.log([owners[owner][name] for owner, name in keys]).T

    def constants(point: np.ndarray) -> Constants:
        values = dict(zip(keys, np.exp(point).tolist(), strict=True))

        def group(wanted: str) -> dict[str, Any]:
            return {name: value for (owner, name), value in values.items() if owner == wanted}

        clusters = {
            name: replace(
                cluster, **{k: v for k, v in group("a100").items() if k not in OWN.get(name, ())} | group(name)
            )
            for name, cluster in base.clusters.items()
        }
        programs = {}
        for name, program in base.programs.items():
            programs[name] = replace(
                program, shape_factors={}, **group("all"), **group(name.removesuffix("_selective"))
            )
        return Constants(clusters, programs)

    def errors(point: np.ndarray) -> np.ndarray:
        made = constants(point)
        parts = [TABLE_WEIGHT * np.log1p(relative_errors(made, table)) for table in tables]
        return np.concatenate([np.log1p(relative_errors(made, csv_table(rows))), *parts])

    def weighted(point: np.ndarray, weights: np.ndarray) -> np.ndarray:
        return np.concatenate([errors(point) * weights / NOISE, (point - centre) / spread])

    point, weights = centre, np.ones(1)
    for _ in range(steps):
        point = least_squares(weighted, point, args=(weights,), max_nfev=60).x
        weights = 1 / np.sqrt(np.maximum(np.abs(errors(point)), NOISE / 5) / NOISE)
    made = constants(point)
    rows = select(rows, one_node(made.clusters["a100"], rows))
    shapes, logs = np.array(layer_shapes(rows[0])), np.log1p(relative_errors(made, csv_table(rows)))
    factors = {}
    for shape in np.unique(shapes).tolist():
        found = logs[shapes == shape]
        factors[shape] = round(float(np.exp(-found.sum() / (len(found) + FORMULA_ROWS))), 4)
    return replace(made, programs=made.programs | {PROGRAM: replace(made.programs[PROGRAM], shape_factors=factors)})


def left_out(base: Constants, rows: Rows, tables: Sequence[Table], numbers: np.ndarray) -> np.ndarray:
    """Return the relative error of each row, predicted by a fit of the rows that have a different number."""
    found = np.empty(len(numbers))
    for number in np.unique(numbers):
        part = numbers == number
        made = fitted(base, select(rows, ~part), tables)
        found[part] = relative_errors(made, csv_table(select(rows, part)))
    return found


def fit(rows: Rows) -> None:
    """Fit the constants, write `clusters/*.json`, and print the errors of rows that a fit has not seen."""
    base, tables, model = read_constants(), published(), models(rows)
    single = one_node(base.clusters["a100"], rows)
    unseen = left_out(base, rows, tables, np.random.default_rng(0).permutation(len(model)) % 5)
    print("unseen rows, five parts:", summary(unseen[single]), "one node;", summary(unseen[~single]), "many nodes")
    of_model = left_out(base, rows, tables, model)
    for number in np.unique(model):
        print(f"unseen model, hidden size and layers {number:.0f}:", summary(of_model[model == number]))
    of_choice = left_out(base, rows, tables, choices(rows) % 5)
    modelled = rows[1] * (1 + of_choice)
    print("unseen groups, five parts:", first_choices(select(rows, single), modelled[single]))
    shapes = np.array(layer_shapes(rows[0]))
    new_shape = np.array([len(np.unique(model[shapes == shape])) == 1 for shape in shapes])
    unseen_by_kind = {
        "known_shape": unseen[single],
        "one_node": of_model[single & new_shape],
        "many_nodes": unseen[~single],
    }
    made = fitted(base, rows, tables)
    programs = {name: described(program) for name, program in made.programs.items()}
    shared = {name: programs[PROGRAM][name] for name in SOFTWARE_PRIORS}
    own = {name: {key: program[key] for key in program if key not in shared} for name, program in programs.items()}
    content = {
        "software": {"all": shared, **own},
        "intervals": {
            kind: round(float(np.quantile(np.abs(np.log1p(errors)), INTERVAL)), 4)
            for kind, errors in unseen_by_kind.items()
        },
    }
    for name, cluster in made.clusters.items():
        file = {"cluster": described(cluster)} | (content if name == "a100" else {})
        (ROOT / "clusters" / f"{name}.json").write_text(json.dumps(file, indent=2) + "\n", encoding="utf-8")


def described(made: Cluster | Software) -> dict[str, Any]:
    """Return the fields that differ from their defaults. Numbers are rounded to four digits."""
    found = {}
    for constant in fields(made):
        value = getattr(made, constant.name)
        if value not in (constant.default, {}):
            found[constant.name] = float(f"{value:.4g}") if isinstance(value, float) else value
    return found


# --- reports ---------------------------------------------------------------------------------------------------------


def summary(errors: np.ndarray) -> str:
    return f"mean {np.abs(errors).mean():.2%}, median {np.median(np.abs(errors)):.2%}"


def compare(rows: Rows, cluster: str) -> dict[str, Any]:
    """Return the errors of the time model on these rows."""
    made, content = read_cluster(cluster)
    x, measured = rows
    program = software(content, PROGRAM)
    seconds = step_seconds(made, program, x)
    errors = np.abs(seconds / measured - 1)
    kinds = np.where(np.isin(layer_shapes(x), list(program.shape_factors)), "known_shape", "one_node")
    width = np.array([content["intervals"][kind] for kind in np.where(one_node(made, rows), kinds, "many_nodes")])
    inside = np.abs(np.log(seconds / measured)) <= width
    worst = np.argsort(-errors)[: max(1, int(WORST * len(errors)))]
    return {
        "rows": len(errors),
        "mean_absolute_relative_error": float(errors.mean()),
        "percentiles": {str(q): float(np.percentile(errors, q)) for q in (50, 90, 95, 99, 100)},
        "interval": {"share_inside": float(inside.mean())},
        "first_choice": first_choices(rows, seconds),
        "worst": [
            {name: int(getattr(x, name)[i]) for name in COLUMNS}
            | {"measured_ms": round(1e3 * float(measured[i]), 1), "modelled_ms": round(1e3 * float(seconds[i]), 1)}
            for i in worst
        ],
    }


def first_choices(rows: Rows, seconds: np.ndarray) -> dict[str, Any]:
    """Return how much slower the model's choices of layouts are than the best measured layouts. There is one for each
    model, number of GPUs and global batch with several layouts; without one, the result is empty."""
    measured, group = rows[1], choices(rows)
    members = [np.flatnonzero(group == number) for number in range(group.max() + 1)]
    slower = np.array([measured[m[np.argmin(seconds[m])]] / measured[m].min() - 1 for m in members if len(m) > 1])
    if not len(slower):
        return {}
    return {
        "groups": len(slower),
        "share_best": float((slower == 0).mean()),
        "share_within_5_percent": float((slower <= 0.05).mean()),
        "mean_slower": float(slower.mean()),
        "worst_slower": float(slower.max()),
    }


def compare_published() -> dict[str, list[dict[str, float]]]:
    """Return the rows of each published table with the model's times, by the table's title."""
    constants, found = read_constants(), {}
    for table in published():
        (x, measured), errors = table.rows, relative_errors(constants, table)
        columns = [x.hidden_size, x.layers, measured, measured * (1 + errors), errors]
        names = ("hidden_size", "layers", "measured_s", "modelled_s", "error")
        found[table.title] = [dict(zip(names, row, strict=True)) for row in np.stack(columns, axis=1).tolist()]
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE.csv", help="measured rows")
    parser.add_argument("--cluster", default="a100", metavar="NAME", help="a file of clusters/ (default: a100)")
    parser.add_argument("--published", action="store_true", help="compare with the tables of three papers")
    parser.add_argument("--fit", action="store_true", help="fit the constants to the rows, and write clusters/*.json")
    parser.add_argument("--json", action="store_true", help="no effect: the program always prints JSON")
    args = parser.parse_args(argv)
    if not (args.files or args.published):
        parser.error("name a CSV file, or give --published")
    try:
        if args.fit:
            return fit(read_rows(args.files))
        found = compare_published() if args.published else compare(read_rows(args.files), args.cluster)
    except (OSError, ValueError) as error:
        parser.exit(2, f"error: {error}\n")
    return print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
