"""Compare the modelled time of a training step with measured ones.

    python benchmarks/step_times.py measured.csv --cluster a100          # errors, worst rows, how often intervals hold
    python benchmarks/step_times.py measured.csv --cluster a100 --json
    python benchmarks/step_times.py --published                          # tables of three papers
    python benchmarks/step_times.py one_node.csv many_nodes.csv --fit    # fit clusters/*.json (scipy; minutes)

A row of the CSV file is one configuration: gpus, global_batch, micro_batch, hidden_size, attention_heads, layers,
sequence_length, tensor_parallel, data_parallel, pipeline_parallel, ms_per_iteration. Each constant in `clusters/*.json`
belongs to a machine or to a program, not to a row or a shape. With --fit, the program prints the errors of rows that
the fit has not seen: five parts at random, and each shape in turn.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # Find the packages if they are not installed.

from data_utils.command_line import align_columns
from megatron.gpt2.extensions.plan.cluster import ROOT, Cluster, read_cluster
from megatron.gpt2.extensions.plan.step_time import Layouts, Software, step_seconds

COLUMNS = [field.name for field in dataclasses.fields(Layouts) if field.name != "num_model_chunks"]
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
    return dataclasses.replace(layouts, **taken), measured[chosen]


def shapes(rows: Rows) -> np.ndarray:
    """Return a number for each row. Rows whose models have the same shape get the same number."""
    return np.asarray(rows[0].hidden_size) * 1000 + rows[0].layers


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


@dataclasses.dataclass(frozen=True)
class Table:
    """A published table: the name of its cluster and of its program in `clusters/NAME.json`, its rows, and whether the
    micro-batch is unknown. If it is, the layout that is fastest in the model is compared."""

    title: str
    cluster: str
    program: str
    rows: Rows
    any_micro_batch: bool = False


def layouts(columns: Sequence[Sequence[float]], names: str) -> Layouts:
    return Layouts(**dict(zip(names.split(), map(np.array, zip(*columns, strict=True)), strict=True)))


def published() -> list[Table]:
    """Return the published tables."""
    names = "global_batch micro_batch hidden_size attention_heads layers sequence_length tensor_parallel data_parallel "
    names += "pipeline_parallel num_model_chunks"
    tables = []
    for gpu, batch, column in (("v100", 8, 4), ("selene", 16, 5)):
        rows = [(batch, batch, h, n, depth, 1024, t, 1, 1, 1) for depth, h, n, t, *_ in TABLE_2020]
        seconds = np.array([row[column] / 1e3 for row in TABLE_2020])
        tables.append(Table(f"Megatron-LM, 2020, {gpu}", gpu, "megatron_2020", (layouts(rows, names), seconds)))
    rows, seconds_2021 = [], []
    for h, depth, n, model_parallel, gpus, batch, tflops, chunks in TABLE_2021:
        t = min(8, model_parallel)
        rows.append((batch, 1, h, n, depth, 2048, t, gpus // model_parallel, model_parallel // t, chunks))
        flops = 96 * batch * 2048 * depth * h * h * (1 + 2048 / (6 * h) + 51200 / (16 * depth * h))
        seconds_2021.append(flops / gpus / tflops / 1e12)
    made = (layouts(rows, names), np.array(seconds_2021))
    tables.append(Table("arXiv:2104.04473, table 1", "selene", "megatron_2021", made, any_micro_batch=True))
    rows = [(batch, b, h, n, depth, 2048, 8, 1, p, chunks) for h, depth, n, p, chunks, batch, b, *_ in TABLE_2022]
    for program, column in (("megatron_2022", 7), ("megatron_2022_selective", 8)):
        seconds = np.array([row[column] for row in TABLE_2022])
        tables.append(Table(f"arXiv:2205.05198, {program}", "selene", program, (layouts(rows, names), seconds)))
    return tables


# --- the fit ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
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
        seconds = step_seconds(cluster, program, dataclasses.replace(x, micro_batch=size))
        tries.append(np.where((x.global_batch / x.data_parallel) % size, np.inf, seconds))
    return np.min(tries, axis=0) / measured - 1


def fitted(base: Constants, rows: Rows, tables: Sequence[Table], steps: int = 4) -> Constants:
    """The constants that give the smallest sum of absolute relative errors over rows and tables, near their priors.

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

        a100 = dataclasses.replace(base.clusters["a100"], **group("a100"))
        network = {name: getattr(base.clusters["selene"], name) for name in ("network", "network_send")}
        clusters = {"a100": a100, "selene": dataclasses.replace(a100, **network)}
        clusters["v100"] = dataclasses.replace(
            a100,
            **{name: getattr(base.clusters["v100"], name) for name in ("memory", "peak_flops", "memory_bandwidth")},
            **group("v100"),
        )
        programs = {}
        for name, program in base.programs.items():
            owner = "megatron_2022" if name == "megatron_2022_selective" else name
            programs[name] = dataclasses.replace(program, **group("all"), **group(owner))
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
    return constants(point)


def left_out(base: Constants, rows: Rows, tables: Sequence[Table], parts: Sequence[np.ndarray]) -> np.ndarray:
    """Return the relative error of each row, predicted by a fit of the rows outside of its part. A row that belongs to
    no part gets NaN."""
    found = np.full(len(rows[1]), np.nan)
    for part in parts:
        made = fitted(base, select(rows, ~part), tables)
        found[part] = relative_errors(made, csv_table(select(rows, part)))
    return found


def fit(rows: Rows) -> None:
    """Fit the constants, write `clusters/*.json`, and print the errors of rows that a fit has not seen."""
    base, tables = read_constants(), published()
    one_node = np.asarray(rows[0].tensor_parallel * rows[0].data_parallel * rows[0].pipeline_parallel <= 8)
    order = np.random.default_rng(0).permutation(len(one_node))
    folds = [np.isin(np.arange(len(order)), order[k::5]) for k in range(5)]
    unseen = left_out(base, rows, tables, folds)
    print("unseen rows, five parts:", summary(unseen[one_node]), "one node;", summary(unseen[~one_node]), "many nodes")
    of_shape = shapes(rows)
    for shape in np.unique(of_shape[one_node]):
        part = of_shape == shape
        print(
            f"unseen shape, hidden size {shape // 1000:.0f}, {shape % 1000:.0f} layers:",
            summary(left_out(base, rows, tables, [part])[part]),
        )
    made = fitted(base, rows, tables)
    programs = {name: described(program) for name, program in made.programs.items()}
    shared = {name: programs[PROGRAM][name] for name in SOFTWARE_PRIORS}
    own = {name: {key: program[key] for key in program if key not in shared} for name, program in programs.items()}
    content = {
        "software": {"all": shared, **own},
        "intervals": {
            name: round(float(np.quantile(np.abs(np.log1p(unseen[part])), INTERVAL)), 4)
            for name, part in (("one_node", one_node), ("many_nodes", ~one_node))
        },
    }
    for name, cluster in made.clusters.items():
        file = {"cluster": described(cluster)} | (content if name == "a100" else {})
        (ROOT / "clusters" / f"{name}.json").write_text(json.dumps(file, indent=2) + "\n", encoding="utf-8")


def described(made: Cluster | Software) -> dict[str, Any]:
    """Return the fields that differ from their defaults. Numbers are rounded to four digits."""
    found = {}
    for field in dataclasses.fields(made):
        value = getattr(made, field.name)
        if value not in (field.default, {}):
            found[field.name] = float(f"{value:.4g}") if isinstance(value, float) else value
    return found


# --- reports ---------------------------------------------------------------------------------------------------------


def summary(errors: np.ndarray) -> str:
    return f"mean {np.abs(errors).mean():.2%}, median {np.median(np.abs(errors)):.2%}"


def compare(rows: Rows, cluster: str) -> dict[str, Any]:
    """Return the errors of the time model on these rows."""
    made, content = read_cluster(cluster)
    x, measured = rows
    seconds = step_seconds(made, software(content, PROGRAM), x)
    errors = np.abs(seconds / measured - 1)
    one_node = np.asarray(x.tensor_parallel * x.data_parallel * x.pipeline_parallel <= made.gpus_per_node)
    width = np.where(one_node, content["intervals"]["one_node"], content["intervals"]["many_nodes"])
    inside = np.abs(np.log(seconds / measured)) <= width
    worst = np.argsort(-errors)[: max(1, int(WORST * len(errors)))]
    described = {name: np.asarray(getattr(x, name)) for name in COLUMNS}
    return {
        "rows": len(errors),
        "mean_absolute_relative_error": float(errors.mean()),
        "percentiles": {str(q): float(np.percentile(errors, q)) for q in (50, 90, 95, 99, 100)},
        "interval": {"share_asked": INTERVAL, "share_inside": float(inside.mean())},
        "first_choice": first_choices(rows, seconds),
        "worst": [
            {name: int(column[i]) for name, column in described.items()}
            | {"measured_ms": round(1e3 * float(measured[i]), 1), "modelled_ms": round(1e3 * float(seconds[i]), 1)}
            for i in worst
        ],
    }


def first_choices(rows: Rows, seconds: np.ndarray) -> dict[str, Any]:
    """Return how much slower the layouts are that the model chooses than the best measured ones. There is one for each
    model, number of GPUs and global batch with several layouts; without one, the result is empty."""
    x, measured = rows
    gpus = x.tensor_parallel * x.data_parallel * x.pipeline_parallel
    keys = np.stack([shapes(rows), x.sequence_length, gpus, x.global_batch], axis=1)
    _, group = np.unique(keys, axis=0, return_inverse=True)
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


def print_published(tables: Mapping[str, Sequence[Mapping[str, float]]]) -> None:
    for title, rows in tables.items():
        print(f"\n{title}: {summary(np.array([row['error'] for row in rows]))}")
        cells = [tuple(rows[0]), *(tuple(f"{value:.4g}" for value in row.values()) for row in rows)]
        print("\n".join(align_columns(cells, ">>>>>")))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE.csv", help="measured rows")
    parser.add_argument("--cluster", default="a100", metavar="NAME", help="a file of clusters/ (default: a100)")
    parser.add_argument("--published", action="store_true", help="compare with the tables of three papers")
    parser.add_argument("--fit", action="store_true", help="fit the constants to the rows, and write clusters/*.json")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    if args.published:
        tables = compare_published()
        return print(json.dumps(tables, indent=2)) if args.json else print_published(tables)
    if not args.files:
        parser.error("name a CSV file, or give --published")
    try:
        rows = read_rows(args.files)
        if args.fit:
            return fit(rows)
        found = compare(rows, args.cluster)
    except (OSError, ValueError) as error:
        parser.exit(2, f"error: {error}\n")
    if args.json:
        return print(json.dumps(found, indent=2))
    print(
        f"{found['rows']} rows, modelled against measured: mean error {found['mean_absolute_relative_error']:.2%}; "
        "percentiles",
        end=" ",
    )
    print(", ".join(f"{q}: {value:.1%}" for q, value in found["percentiles"].items()))
    print(f"{found['interval']['share_inside']:.0%} of the rows are inside of intervals made for {INTERVAL:.0%}")
    if choice := found["first_choice"]:
        print(
            f"fastest layout by the model, for {choice['groups']} models, GPU counts and batches: the best measured "
            f"in {choice['share_best']:.0%}, within 5 % of it in {choice['share_within_5_percent']:.0%}, "
            f"{choice['mean_slower']:.1%} slower on average"
        )
    print(f"the worst {WORST:.0%} of the rows:")
    cells = [tuple(found["worst"][0]), *(tuple(map(str, row.values())) for row in found["worst"])]
    print("\n".join(align_columns(cells, ">" * len(cells[0]))))
    return None


if __name__ == "__main__":
    main()
