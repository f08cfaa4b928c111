#!/usr/bin/env python3
"""Faults at random moments, and what the runs are worth after them.

    python benchmarks/faults.py random --trials 50     # of all kinds; a call that is interrupted goes on
    python benchmarks/faults.py kills     # runs of 4 ranks, a rank of which is killed, and started again
    python benchmarks/faults.py nodes     # runs on two "machines", one of which is lost, and comes back in half
    python benchmarks/faults.py stops     # runs that SIGTERM stops at a random moment, and that are continued
    python benchmarks/faults.py kills --trials 3 --output DIR

Runs are started as a user starts them, and the faults come from outside: signals to processes. A trial is good if every
loss and every bit of the last checkpoint, weights and optimizer, are those of the run that nothing disturbed. The exit
code is 1 if a trial is not good.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works in a clone that is not installed

import torch

from benchmarks import harness
from megatron.gpt2.checkpoint.folder import find_checkpoint
from megatron.gpt2.monitor.incidents import read_incidents

STEPS, SAVE_INTERVAL = 60, 8
RUN = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --device cpu "
    "--tokenizer-type bytes --precision fp32 --attention-dropout 0.1 --hidden-dropout 0.1 --micro-batch-size 1 "
    f"--global-batch-size 8 --train-iters 1000 --eval-iters 0 --log-interval 1 --exit-interval {STEPS} "
    f"--save-interval {SAVE_INTERVAL}"
)
TENSOR, PIPELINE = "--model-parallel-size 2", "--pipeline-model-parallel-size 2"
LAYOUTS = (TENSOR, TENSOR, PIPELINE)  # each with two data-parallel ranks: a third with a pipeline
HELD = 12.0  # seconds that a rank stands still, until the machine that was lost is back
TIMEOUT = 300.0
Trial = dict[str, Any]


class Started:
    """A run under way: the process that starts its ranks."""

    def __init__(self, save: Path, words: str, environment: dict[str, str] | None = None) -> None:
        self.save, self.log = save, save.with_suffix(f".{time.monotonic_ns()}.log")
        folder = save.parent
        data = f"--train-data {folder}/text.txt --data-cache-path {folder}/cache --save {save}"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, harness.ROOT / "pretrain_gpt2.py", *f"{RUN} {data} {words}".split()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
            )

    def end(self) -> tuple[int, str]:
        """Exit code, and the end of what it wrote. A run that does not end is killed."""
        try:
            self.process.wait(TIMEOUT)
        except subprocess.TimeoutExpired:
            self.kill()
        return self.process.wait(), self.log.read_text()[-600:]

    def ranks(self) -> list[int]:
        """The processes that train: those below with a program's worth of memory of their own."""
        return [process for process in _below(self.process.pid) if _anonymous_bytes(process) > 50 << 20]

    def kill(self) -> None:
        """The machine is gone: the starter and all below it, before any of them can say a word."""
        self.process.send_signal(signal.SIGSTOP)  # else it would tell its ranks to end
        for process in [*_below(self.process.pid), self.process.pid]:
            send(process, signal.SIGKILL)
        self.process.wait()

    def wait_for(self, is_there: Callable[[], bool]) -> None:
        """AssertionError if the run ends before."""
        end = time.monotonic() + TIMEOUT
        while not is_there():
            assert time.monotonic() < end and self.process.poll() is None, self.end()
            time.sleep(0.001)

    def wait_for_step(self, step: int) -> None:
        """Until the loss of this step is written."""
        metrics = self.save / "metrics.jsonl"
        self.wait_for(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") >= step)


def _below(process: int) -> list[int]:
    """The processes that it started, and those that these started."""
    with contextlib.suppress(OSError):
        texts = [path.read_text() for path in Path(f"/proc/{process}/task").glob("*/children")]
        own = [int(number) for text in texts for number in text.split()]
        return own + [number for child in own for number in _below(child)]
    return []


def _anonymous_bytes(process: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) << 10
    return 0


def send(process: int, number: signal.Signals) -> None:
    """Nothing if the process is gone already."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)


def losses(save: Path) -> list[float]:
    """Of each step of the run that stands in the folder."""
    lines = map(json.loads, (save / "metrics.jsonl").read_text().splitlines())
    return [record["lm_loss"] for record in lines if "split" not in record]


def outcome(save: Path, undisturbed: Path, ended: tuple[int, str]) -> Trial:
    """ "good", and else what differs to the bit from the run that nothing disturbed: losses, and tensors of the last
    checkpoint; or how the run ended."""
    code, said = ended
    if code:
        return {"good": False, "exit_code": code, "said": harness.without_paths(said)}
    found, expected = (find_checkpoint(folder, log=print) for folder in (save, undisturbed))
    assert found is not None and expected is not None and expected.iteration == STEPS
    names = [name for name in expected.names() if not name.startswith("rng")]
    differing = ["iteration"] if found.iteration != STEPS else []
    differing += [name for name in names if not torch.equal(found.read(name), expected.read(name))]
    differing += ["losses"] * (losses(save) != losses(undisturbed))
    return {"good": not differing and len(losses(save)) == STEPS, "differing": differing}


@functools.cache
def undisturbed(folder: Path, layout: str) -> Path:
    """The --save folder of a run of this layout that nothing disturbs."""
    if not (folder / "text.txt").exists():
        harness.write_text(folder, 1000)
    save = folder / f"undisturbed_{'_'.join(layout.split())}"
    code, said = Started(save, f"{layout} --nproc-per-node 4").end()
    assert code == 0, said
    return save


def kill(folder: Path, seed: int) -> Trial:
    """A rank is killed, in half of the trials when a save has begun, and --max-restarts starts the run again."""
    chance, layout, inside = random.Random(seed), LAYOUTS[seed % 3], seed % 2 == 0
    other = undisturbed(folder, layout)
    run = Started(folder / f"kill_{seed}", f"{layout} --nproc-per-node 4 --max-restarts 3")
    step, rank = chance.randint(1, STEPS - 2 * SAVE_INTERVAL), chance.randrange(4)
    run.wait_for_step(step)
    if inside:
        run.wait_for(lambda: any(run.save.glob("iter_*.tmp*")))
    else:
        time.sleep(chance.uniform(0, 0.1))
    send(run.ranks()[-4:][rank], signal.SIGKILL)
    found = outcome(run.save, other, run.end())
    restarts = [one for one in read_incidents(run.save) if one["kind"] == "restart"]
    fault = f"rank {rank} after step {step}" + ", inside the next save" * inside
    return {
        "layout": layout,
        "fault": fault,
        "restarts": len(restarts),
        **found,
        "good": found["good"] and restarts != [],
    }


def node(folder: Path, seed: int) -> Trial:
    """Of two machines with two ranks each the second is lost. The run goes on with the other, at half the data-parallel size.
    In half of the trials the machine comes back, and the run grows again."""
    chance, layout = random.Random(seed), f"{TENSOR} --exact-layouts 2"
    other, save, returns = undisturbed(folder, layout), folder / f"node_{seed}", seed % 2 == 1
    lost, step = 1, chance.randint(1, STEPS - 4 * SAVE_INTERVAL)  # the first machine serves the store

    def machine(number: int) -> Started:
        place = f"--nnodes 2 --node-rank {number} --init-method file://{folder}/place_{seed} --init-timeout 10"
        words = f"{layout} --nproc-per-node 2 {place} --elastic --max-restarts 3"
        return Started(save, words, {"SLURMD_NODENAME": f"127.0.0.{number + 1}"})

    stays, gone = machine(1 - lost), machine(lost)
    stays.wait_for_step(step)
    time.sleep(chance.uniform(0, 0.1))
    gone.kill()
    ended = [0]
    stays.wait_for(lambda: sizes_of(save)[1:] == [1])
    if returns:
        held = stays.ranks()[-2:]
        for process in held:
            send(process, signal.SIGSTOP)
        back = machine(lost)
        time.sleep(HELD)
        for process in held:
            send(process, signal.SIGCONT)
        ended.append(back.end()[0])
    found, sizes = outcome(save, other, stays.end()), sizes_of(save)
    good = found["good"] and not any(ended) and sizes == [2, 1] + [2] * returns
    fault = f"machine {lost} after step {step}" + ", and it comes back" * returns
    return {"fault": fault, "data_parallel_sizes": sizes, **found, "good": good}


def sizes_of(save: Path) -> list[int]:
    """The data-parallel sizes of a run, one after the other. A rank may be killed before it has noted its start."""
    starts = [one["layout"]["data"] for one in read_incidents(save) if one["kind"] == "start"]
    return [size for size, _ in itertools.groupby(starts)]


def stop(folder: Path, seed: int) -> Trial:
    """SIGTERM at a random moment, in half of the trials with --async-save; the same command goes on."""
    chance, layout = random.Random(seed), f"{LAYOUTS[seed % 3]} --nproc-per-node 4"
    other, save = undisturbed(folder, LAYOUTS[seed % 3]), folder / f"stop_{seed}"
    run = Started(save, layout + " --async-save" * (seed % 2))
    run.wait_for_step(chance.randint(1, STEPS - 2))
    time.sleep(chance.uniform(0, 0.1))
    run.process.terminate()
    ended, note = run.end(), json.loads((save / "ended.json").read_text())
    if note["iteration"] < STEPS:
        again = Started(save, layout).end()
        ended = ended[0] or again[0], ended[1] + again[1]
    found = {"layout": layout, "stopped_at": note["iteration"], "reason": note["reason"]}
    return {**found, **outcome(save, other, ended)}


def any_of_them(folder: Path, seed: int) -> Trial:
    """Kills, lost machines and stops, in turn."""
    do = (kill, node, stop)[seed % 3]
    return {"kind": do.__name__, **do(folder, seed // 3)}


# The trial of each part, and how many there are.
PARTS = {"random": (any_of_them, 50), "kills": (kill, 100), "nodes": (node, 50), "stops": (stop, 20)}


def main(argv: Sequence[str] | None = None) -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--trials", type=int, help="how many (default: those of the part)")
    parser.add_argument("part", nargs="?", choices=tuple(PARTS), default="random")
    chosen = harness.options(parser, argv)
    do, trials = PARTS[chosen.part]
    trials = 3 if chosen.smoke else chosen.trials or trials
    path = chosen.output / f"faults_{chosen.part}.json"
    return int(not harness.campaign(f"faults: {chosen.part}", path, trials, do))


if __name__ == "__main__":
    raise SystemExit(main())
