"""Start ranks like a launcher, but faster: `StartedRank` forks a rank from a process that has imported torch and the
program. Each rank has a separate environment and output."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from megatron.gpt2.commands.pretrain_gpt2 import main
from tests.distributed import CONTEXT
from tests.megatron.gpt2.train.training_runs import SMALL

LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "SLURM", "PMI", "OMPI", "GLOO", "TORCHELASTIC", "PBS", "LSB")


def clean_environment() -> dict[str, str]:
    """Return this process's environment without the variables of launchers."""
    return {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}


def _run(
    program: Callable[[Sequence[str]], int],
    argv: Sequence[str],
    environ: Mapping[str, str],
    output: str,
    before: Callable[[], object],
) -> None:
    os.environ.clear()
    os.environ.update({**clean_environment(), **environ, "OMP_NUM_THREADS": "1"})
    with open(output, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    before()
    sys.exit(program(argv))


class StartedRank:
    """A running process of `program`.

    before: a function that the process calls before `program`, while it has no threads.
    """

    def __init__(
        self,
        folder: Path,
        argv: Sequence[str],
        environ: Mapping[str, str],
        before: Callable[[], object] = int,
        program: Callable[[Sequence[str]], int] = main,
    ) -> None:
        self.output = folder / f"output_{time.monotonic_ns()}"
        self.output.touch()
        self.process: ForkServerProcess = CONTEXT.Process(
            target=_run, args=(program, [*flags(folder), *argv], dict(environ), str(self.output), before)
        )
        self.process.start()

    def end(self, timeout: float = 240) -> tuple[int | None, str]:
        """Return the exit code and the output. The exit code is None if the process hung and was killed."""
        self.process.join(timeout)
        code = self.process.exitcode
        self.process.kill()
        self.process.join()
        return code, self.output.read_text()


def flags(folder: Path) -> list[str]:
    """Return the flags of a run with five steps of four samples on the text in `folder`."""
    shape = (
        "--num-layers 1 --hidden-size 32 --micro-batch-size 1 --global-batch-size 4 --log-interval 1 --exit-interval 5"
    )
    return [*SMALL, *shape.split(), "--train-data", f"{folder}/text.txt", "--data-cache-path", f"{folder}/cache"]


def losses(save: Path) -> list[float]:
    lines = (save / "metrics.jsonl").read_text().splitlines()
    return [record["lm_loss"] for record in map(json.loads, lines) if "split" not in record]


def wait_until(condition: Callable[[], object], seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def free_port() -> int:
    """Return a free port below the ephemeral ones. Each test process uses different ports, because a rank that retries
    its port could connect to the ranks of another test."""
    process = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 16
    for port in random.SystemRandom().sample(range(20_000 + process, 32_000, 16), 100):
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port
    raise OSError("no port is free")
