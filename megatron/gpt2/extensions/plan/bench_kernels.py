"""Measure the kernels and the collectives of a machine, and write a file that `tools/plan.py --cluster` reads:

    python tools/bench_kernels.py --nproc-per-node 4 --output machine.json
    srun python tools/bench_kernels.py --output cluster.json

Start as many ranks on each machine as the training will have, because ranks share memory, cores and links: all measure
at the same time. Each figure is the shortest of --rounds rounds. Constants are fitted so that relative errors are
small: matrix products by their three sizes, other kernels by a constant and a time per byte.
"""

import dataclasses
import functools
import itertools
import json
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from data_utils.command_line import Log, Parser, how_to_call, plural, positive_int, require
from data_utils.files import machine_memory
from megatron.gpt2.commands.bench_collectives import OPERATIONS, gather_objects, make_groups, run_and_check
from megatron.gpt2.device import (
    PRECISION_DTYPES,
    choose_backend,
    choose_device,
    peak_flops,
    set_allocator,
    set_threads,
    synchronize,
    usable_cores,
)
from megatron.gpt2.dist.ranks import RankInfo
from megatron.gpt2.dist.rendezvous import initialize_distributed
from megatron.gpt2.dist.run_program import run_program
from megatron.gpt2.extensions.plan.cluster import FLOPS_PER_MULTIPLICATION, Cluster, Measured, collective_key
from megatron.gpt2.extensions.plan.simulate import BACKWARD_PRODUCTS, CAUSAL, FORWARD_PRODUCTS

# rows, columns and inner elements of a matrix product
PRODUCTS = tuple(itertools.product((256, 1024), (512, 2048), (256, 1024)))
ELEMENTS = (1 << 8, 1 << 16, 1 << 19, 1 << 21)
ATTENTION = (4, 8, 256, 64)  # batch size, heads, sequence length, head size
BYTES = (1 << 12, 1 << 16, 1 << 19, 1 << 21, 1 << 23, 1 << 25)
LONGEST = 0.5  # seconds of a collective above which larger sizes are not measured
COLLECTIVES = {
    "all_reduce_sum": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "isend_irecv": "send",
}
ADAM_BYTES = 28  # AdamW reads four float32 numbers of a parameter and writes three.
CACHE_BYTES, MAX_COPIES = 96 << 20, 64
TIMEOUT_MINUTES = 5
SMALL = 1e-12  # replaces a fitted constant of 0, since a file has only positive constants

Times = dict[Any, np.ndarray]  # {kernel: [seconds]} and {collective: [seconds, seconds of the processor]}


def fit(times: Sequence[float], *columns: Sequence[float] | np.ndarray) -> list[float]:
    """Return the constants, at least `SMALL`, for which the sum of `columns` times constants is closest to `times`, by
    relative errors."""
    measured, terms = np.array(times), np.array(columns, dtype=float)
    columns_left = list(range(len(terms)))
    while True:
        values = np.linalg.lstsq((terms[columns_left] / measured).T, np.ones(len(measured)), rcond=None)[0]
        if (values > 0).all():
            constants = dict(zip(columns_left, values.tolist(), strict=True))
            return [constants.get(number, SMALL) for number in range(len(terms))]
        columns_left.pop(int(values.argmin()))


def time_kernel(run: Callable[..., Tensor], operands: Sequence[Tensor], seconds: float) -> np.ndarray:
    """Return the mean time of a kernel that all ranks repeat for `seconds`, without waiting for each other. Each call
    has different operands, which are not in the processor's caches, as in a training step. On a CPU the result is the
    processor's time, because `Cluster.ranks_per_core` accounts for ranks that share a core."""
    device = operands[0].device
    is_cpu = device.type == "cpu"
    clock = time.process_time if is_cpu else time.perf_counter
    copies = min(MAX_COPIES, max(1, CACHE_BYTES // sum(x.nbytes for x in operands)))
    sets = [[x.clone() for x in operands] for _ in range(copies)]
    outputs = deque((run(*each) for each in sets), copies)
    dist.barrier()
    synchronize(device)
    start, end, count = clock(), time.perf_counter() + seconds, 0
    while count == 0 or time.perf_counter() < end:
        outputs.append(run(*sets[count % copies]))
        count += 1
    synchronize(device)
    taken = (clock() - start) / (torch.get_num_threads() if is_cpu else 1)
    return np.mean(gather_objects(taken / count), keepdims=True)


def time_collective(run: Callable[[], object], device: torch.device, seconds: float, first: float) -> np.ndarray:
    """Return the time of a collective, and the processor's time in the collective.

    first: the time of the first run on this rank.
    """
    count = gather_objects(max(3, min(200, int(seconds / first))))[0]
    run()
    synchronize(device)
    start = time.perf_counter(), time.process_time()
    for _ in range(count):
        run()
    synchronize(device)
    end = time.perf_counter(), time.process_time()
    return np.mean(gather_objects(np.subtract(end, start) / count), axis=0)


def attention_and_gradient(q: Tensor, k: Tensor, v: Tensor, gradient: Tensor) -> Tensor:
    """Return the gradient of the queries in causal attention: [b, n, s, d] each."""
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    return torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v), gradient)[0]


def measure_kernels(device: torch.device, dtype: torch.dtype, seconds: float) -> Times:
    """Time matrix products, sums of two tensors, GELU, and attention with its backward pass."""

    def timed(run: Callable[..., Tensor], *shapes: Sequence[int]) -> np.ndarray:
        return time_kernel(run, [torch.randn(*shape, device=device, dtype=dtype) for shape in shapes], seconds)

    times: Times = {(m, n, k): timed(F.linear, (m, k), (n, k)) for m, n, k in PRODUCTS}
    times |= {("add", size): timed(torch.add, [size], [size]) for size in ELEMENTS}
    times["gelu"] = timed(functools.partial(F.gelu, approximate="tanh"), [ELEMENTS[-1]])
    times["attention"] = timed(attention_and_gradient, *[ATTENTION] * 4)
    return times


def measure_collectives(device: torch.device, seconds: float) -> Times:
    """Time the collectives of the world and of its halves, and messages between the halves. A key of the result is
    (name, number of ranks, number of hosts, bytes)."""
    hosts, groups, times = gather_objects(os.uname().nodename), make_groups(), Times()
    for operation, name in COLLECTIVES.items():
        for group in groups.values() if name != "send" else [groups[""]]:
            ranks = dist.get_process_group_ranks(group)
            nodes = len({hosts[rank] for rank in ranks})
            for size in BYTES:
                run, nbytes, first, _ = run_and_check(OPERATIONS[operation], group, size, device, torch.float32)
                taken = times[name, len(ranks), nodes, nbytes] = time_collective(run, device, seconds, first)
                if taken[0] > LONGEST:
                    break
    return times


def rows_of_collectives(times: Times) -> dict[str, list[Measured]]:
    """Return the sizes and times of each collective in each kind of group."""
    groups = itertools.groupby(sorted(times.items(), key=lambda item: item[0]), lambda item: item[0][:3])
    return {
        collective_key(*key): [Measured(size, *taken.tolist()) for (*_, size), taken in group] for key, group in groups
    }


def fit_cluster(kernels: Times, collectives: Times, itemsize: int, nodes: int, ranks: int, **known: float) -> Cluster:
    """Fit the constants of a cluster.

    itemsize: bytes of an element of the kernels.
    known: constants that are not fitted.
    """
    m, n, k = np.array(PRODUCTS, dtype=float).T
    work = FLOPS_PER_MULTIPLICATION * m * n * k
    whole, *of_sizes = fit([kernels[shape][0] for shape in PRODUCTS], work, work / m, work / n, work / k)
    kernel, per_byte = fit(
        [kernels["add", size][0] for size in ELEMENTS],
        np.ones(len(ELEMENTS)),
        [3 * itemsize * size for size in ELEMENTS],  # An addition reads two tensors and writes one.
    )
    measured = rows_of_collectives(collectives)
    reduce, send = (measured[collective_key(name, ranks, nodes)] for name in ("all_reduce", "send"))
    hop, link = reduce[0].seconds / (ranks - 1), 2 * (ranks - 1) / ranks * reduce[-1].size / reduce[-1].seconds
    sent = send[-1].size / send[-1].seconds
    cluster = Cluster(
        gpus_per_node=ranks // nodes,
        matmul_flops=1 / whole,
        **{f"half_{size}": each / whole for size, each in zip("mnk", of_sizes, strict=True)},
        memory_bandwidth=1 / per_byte,
        **dict.fromkeys(("kernel", "launch", "step"), kernel),
        launch_growth=SMALL,
        **dict.fromkeys(("hop", "network_hop"), hop),
        **dict.fromkeys(("link", "data_link", "network"), link),
        **dict.fromkeys(("send", "network_send"), sent),
        send_latency=send[0].seconds,
        adam=ADAM_BYTES * per_byte,
        collectives=measured,
        **known,
    )
    b, heads, s, head_size = ATTENTION
    products = CAUSAL * (FORWARD_PRODUCTS + BACKWARD_PRODUCTS) * cluster.matmul(s, s, head_size, b * heads)
    gelu = kernels["gelu"][0] - cluster.move(2 * itemsize * ELEMENTS[-1])
    return dataclasses.replace(
        cluster, function=max(gelu / ELEMENTS[-1], SMALL), attention=kernels["attention"][0] / products
    )


def bench_kernels(argv: Sequence[str], rank_info: RankInfo, log: Log) -> int:
    """Start the process group, measure, and write the file. Return the exit code."""
    parser = Parser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, metavar="FILE.json", help="the file of the cluster")
    parser.add_argument(
        "--dtype", default="fp32", choices=tuple(PRECISION_DTYPES), help="of the kernels (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=positive_int, default=3, metavar="N", help="default: %(default)s")
    seconds = "of each measurement (default: %(default)s)"
    parser.add_argument("--seconds", type=float, default=0.2, metavar="X", help=seconds)
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    args = parser.parse_args(argv)
    ranks, dtype = rank_info.world_size, PRECISION_DTYPES[args.dtype]
    require(ranks > 1, f"this needs at least two ranks: {how_to_call('bench_kernels')} --nproc-per-node 2")
    set_threads(rank_info)
    device, line = choose_device(args.device, rank_info)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    initialize_distributed(rank_info, choose_backend(None, device)[0], device, TIMEOUT_MINUTES)
    set_allocator(device)
    kernels, collectives = Times(), Times()
    for _ in range(args.rounds):
        for shortest, measured in (
            (kernels, measure_kernels(device, dtype, args.seconds)),
            (collectives, measure_collectives(device, args.seconds)),
        ):
            shortest |= {key: np.minimum(taken, shortest.get(key, taken)) for key, taken in measured.items()}
    nodes = len(set(gather_objects(os.uname().nodename)))
    known = {"peak_flops": peak_flops(device, dtype)[0]}
    if device.type == "cuda":
        known["memory"] = torch.cuda.mem_get_info(device)[1]
    else:
        local = ranks // nodes
        known["memory"] = (machine_memory("MemTotal") or 0) / local
        known["ranks_per_core"] = max(1.0, local * torch.get_num_threads() / usable_cores())
    cluster = fit_cluster(kernels, collectives, dtype.itemsize, nodes, ranks, **known)
    if rank_info.rank == 0:
        about = f"{plural(ranks, 'rank')} on {plural(nodes, 'host')}; {line}; {args.dtype}; torch {torch.__version__}"
        content = {"about": about, "cluster": vars(cluster)}
        args.output.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        log(f"{args.output}: {about}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: sys.argv[1:]). Return the exit code."""
    return run_program(bench_kernels, argv)
