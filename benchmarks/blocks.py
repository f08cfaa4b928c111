#!/usr/bin/env python3
"""Tensor-parallel blocks against PyTorch's own tensor parallelism, over gloo on a CPU:

    python benchmarks/train.py --preset blocks        # or benchmarks/blocks.py

4 GPT-2 blocks (h 768, 12 heads, s 1,024, b 2), forward and backward alone, no dropout, weights and activations in
fp32 or bf16: ours in one process of two threads and in two processes of one, and the same blocks of plain torch.nn in
one process and, by `parallelize_module` with DTensor, in two. The processes of all arms stay alive, blocked on a pipe,
while one of them is timed; the order is mirrored from round to round, and ratios are taken inside a round.
Legend: b batch, s sequence, h hidden.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works in a clone that is not installed

import numpy as np

from benchmarks import report
from benchmarks.block_arms import TIMEOUT, Shape

TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2}  # ‖difference‖ / ‖plain in one process‖ of output and input gradient
# name, the processes; (ours, plain) × (1, 2). The first of each pair of `RATIOS` is to be the faster.
ARMS = {
    "ours, 1 process": ("ours", 1),
    "ours, mp 2": ("ours", 2),
    "plain, 1 process": ("plain", 1),
    "DTensor, mp 2": ("plain", 2),
}
RATIOS = [
    ("ours, mp 2", "ours, 1 process", {"bf16": 0.85, "fp32": 0.98}),
    ("DTensor, mp 2", "plain, 1 process", {}),
    ("ours, mp 2", "DTensor, mp 2", {"bf16": 1.15}),
    ("ours, 1 process", "plain, 1 process", {}),
]


class Workers:
    """The processes of one arm."""

    def __init__(self, kind: str, size: int, shape: Shape, folder: str) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": str(max(1, 2 // size)), "GLOO_SOCKET_IFNAME": "lo"}
        self.log = open(f"{folder}/{kind}{size}.log", "w")  # noqa: SIM115  lives as long as the processes
        self.processes = [
            subprocess.Popen(
                [
                    sys.executable,
                    str(Path(__file__).resolve().parent / "block_arms.py"),
                    kind,
                    str(size),
                    str(rank),
                    json.dumps(asdict(shape)),
                    folder,
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.log,
                env=environment,
            )
            for rank in range(size)
        ]

    def tell(self, line: str) -> None:
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(f"{line}\n".encode())
            process.stdin.flush()

    def hear(self) -> list[dict[str, Any]]:
        """An answer of every rank. RuntimeError with the last line of the log where one is late or ended."""
        said: dict[int, bytes] = dict.fromkeys(range(len(self.processes)), b"")
        end = time.monotonic() + TIMEOUT
        with selectors.DefaultSelector() as ready:
            for rank, process in enumerate(self.processes):
                assert process.stdout is not None
                ready.register(process.stdout, selectors.EVENT_READ, rank)
            while ready.get_map():
                events = ready.select(max(0.0, end - time.monotonic()))
                for key, _ in events:
                    got = os.read(key.fd, 65536)
                    said[key.data] += got
                    if not got:
                        raise RuntimeError(self._last_line())
                    if said[key.data].endswith(b"\n"):
                        ready.unregister(key.fileobj)
                if not events:
                    raise RuntimeError(f"no answer in {TIMEOUT:.0f} s: {self._last_line()}")
        return [json.loads(text) for text in said.values()]

    def ask(self, line: str) -> list[dict[str, Any]]:
        self.tell(line)
        return self.hear()

    def _last_line(self) -> str:
        lines = [line for line in Path(self.log.name).read_text(errors="replace").splitlines() if line.strip()]
        return report.without_paths(lines[-1]) if lines else "it ended without a word"

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        self.log.close()


def gate(folder: str, dtype: str) -> dict[str, float]:
    """The largest relative difference of each arm, over its ranks, from plain blocks in one process."""
    errors = {}
    for name, (kind, size) in ARMS.items():
        worst = 0.0
        for rank in range(size):
            for what in ("output", "input_gradient"):
                expected = np.load(f"{folder}/plain1_0_{dtype}_{what}.npy")
                got = np.load(f"{folder}/{kind}{size}_{rank}_{dtype}_{what}.npy")
                worst = max(worst, float(np.linalg.norm(got - expected) / np.linalg.norm(expected)))
        errors[name] = worst
    return errors


def compare(
    shape: Shape, rounds: int, iterations: int, pause: float, result: dict[str, Any], path: Path, folder: str
) -> bool:
    """Fill `result`; whether all arms agreed. `pause`: seconds before each timing."""
    workers: dict[str, Workers] = {}
    try:
        for name, (kind, size) in ARMS.items():
            workers[name] = Workers(kind, size, shape, folder)
        for each in workers.values():
            each.hear()
        for dtype in ("fp32", "bf16"):
            for each in workers.values():
                each.ask(f"gate {dtype}")
            errors = gate(folder, dtype)
            result["gate"][dtype] = errors
            worst = max(errors.values())
            print(
                f"gate {dtype}: outputs and input gradients within {worst:.1e} of plain blocks in one process",
                flush=True,
            )
            if not worst <= TOLERANCE[dtype]:
                print(f"THE GATE FAILED in {dtype}: {errors}, allowed {TOLERANCE[dtype]}")
                return False
        for dtype in ("fp32", "bf16"):
            times: dict[str, list[float]] = {name: [] for name in ARMS}
            result["seconds"][dtype] = times
            for number in range(rounds + 1):  # the first warms up and does not count
                for name in list(ARMS)[:: 1 if number % 2 else -1]:
                    time.sleep(pause)  # until the threads of the arm before have gone to sleep
                    seconds = max(answer["seconds"] for answer in workers[name].ask(f"time {dtype} {iterations}"))
                    if number:
                        times[name].append(seconds)
                report.write(path, result)
            print(
                f"{dtype}: "
                + ", ".join(f"{name} {1000 * report.spread(t)['median']:,.1f} ms" for name, t in times.items()),
                flush=True,
            )
    finally:
        for each in workers.values():
            each.end()
    return True


def summarise(result: dict[str, Any]) -> None:
    """Ratios of speeds inside each round, and the table of them."""
    rows = []
    for dtype, times in result["seconds"].items():
        for fast, slow, wanted in RATIOS:
            ratio = report.spread([b / a for a, b in zip(times[fast], times[slow], strict=True)])
            goal = wanted.get(dtype)
            result["ratios"].append({"dtype": dtype, "speed_of": fast, "over": slow, **ratio, "goal": goal})
            rows.append(
                [
                    f"{fast} ÷ {slow}",
                    dtype,
                    *(f"{ratio[key]:.3f}" for key in ("median", "p10", "p90")),
                    f"{goal:.2f} {'met' if ratio['median'] >= goal else 'MISSED'}" if goal else "",
                ]
            )
    print("\n" + report.table(["speed, forward + backward", "dtype", "median", "p10", "p90", "goal"], rows) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--alternations", type=int, default=9, help="rounds over all arms (default: 9)")
    parser.add_argument("--iterations", type=int, default=2, help="forward and backward passes of one timing")
    parser.add_argument("--output", metavar="DIR", default=str(report.RESULTS))
    parser.add_argument("--smoke", action="store_true", help="tiny blocks, 3 rounds: proves the script")
    chosen = parser.parse_args(argv)
    shape, rounds = (Shape(2, 64, 4, 64, 2), 3) if chosen.smoke else (Shape(), chosen.alternations)
    path = Path(chosen.output) / "blocks.json"
    result: dict[str, Any] = {
        **report.header("blocks"),
        "smoke": chosen.smoke,
        "shape": asdict(shape),
        "iterations": chosen.iterations,
        "tolerance": TOLERANCE,
        "gate": {},
        "seconds": {},
        "ratios": [],
    }
    with tempfile.TemporaryDirectory() as folder:
        try:
            agreed = compare(shape, rounds, chosen.iterations, 0.02 if chosen.smoke else 0.3, result, path, folder)
        except RuntimeError as error:
            result["failed"], agreed = str(error), False
            print(f"FAILED: {error}")
    if agreed:
        summarise(result)
        print(
            report.plot(
                path.with_suffix(".png"),
                f"blocks: {report.machine_line(result)}",
                [
                    (
                        f"ms, forward + backward, {dtype}",
                        [
                            (name, *(1000 * report.spread(t)[key] for key in ("median", "p10", "p90")))
                            for name, t in times.items()
                        ],
                    )
                    for dtype, times in result["seconds"].items()
                ],
            )
        )
    report.write(path, result)
    print(f"wrote {path.name}")
    return 0 if agreed else 1


if __name__ == "__main__":
    raise SystemExit(main())
