"""Each way to start ranks trains the same five steps, and errors name the rank."""

from __future__ import annotations

import builtins
import errno
import io
import os
import platform
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fork_server import WarmPython
from tests.megatron.gpt2.dist.started_ranks import StartedRank, clean_environment, flags, free_port, losses
from tests.megatron.gpt2.train.training_runs import write_text

ROOT = Path(__file__).resolve().parents[4]
SRUN = r"""#!/usr/bin/env bash
# Four tasks on two hosts, without SLURM_NTASKS, which Slurm does not always set.
while [[ $1 == --* ]]; do shift; done
tasks=()
for task in 0 1 2 3; do
    SLURM_PROCID=$task SLURM_LOCALID=$((task % 2)) SLURM_NODEID=$((task / 2)) SLURMD_NODENAME=node00$((3 + task / 2)) \
        SLURM_STEP_ID=0 SLURM_STEP_NODELIST='node[003-004]' SLURM_STEP_TASKS_PER_NODE='2(x2)' "$@" &
    tasks+=($!)
done
for task in "${tasks[@]}"; do wait "$task" || exit; done
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("launchers")
    os.utime(write_text(folder), (1e9, 1e9))  # The time is old, because each rank would hash a new file again.
    return folder


@pytest.fixture(scope="module")
def single(folder: Path) -> list[float]:
    """Return the losses of a run with one process."""
    code, output = StartedRank(folder, ["--save", f"{folder}/single"], {}).end()
    assert code == 0, output
    found = losses(folder / "single")
    assert len(found) == 5 and found[-1] < found[0]
    return found


def finish(ranks: list[StartedRank]) -> list[str]:
    ended = [rank.end() for rank in ranks]
    assert [code for code, _ in ended] == [0] * len(ranks), "\n".join(output for _, output in ended)
    return [output for _, output in ended]


@pytest.mark.parametrize("scheme", ["tcp", "file"])
def test_by_hand(folder: Path, single: list[float], scheme: str) -> None:
    save, path = folder / scheme, folder / "store file"
    place = f"tcp://localhost:{free_port()}" if scheme == "tcp" else f"file://{path}"
    outputs = finish(
        [
            StartedRank(
                folder, ["--save", str(save), "--rank", str(rank), "--world_size=2", "--init-method", place], {}
            )
            for rank in (1, 0)
        ]
    )
    assert losses(save) == pytest.approx(single, rel=1e-5)
    # The local ranks are decided by the rendezvous, because no launcher gives them.
    assert f"host {os.uname().nodename}: ranks 0-1 of 2 on cpu (1 thread each)\n" in outputs[1]
    assert outputs[0] == "" and not path.exists()


def program(folder: Path, *command: str, **variables: str) -> subprocess.Popen[bytes]:
    """Start a process whose output goes to the file `output` in `folder`."""
    environ = {
        **clean_environment(),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        **variables,
    }
    with open(folder / "output", "wb") as output:
        return subprocess.Popen(command, env=environ, cwd=folder, stdout=output, stderr=subprocess.STDOUT)


def test_srun(python: WarmPython, folder: Path, single: list[float]) -> None:
    save, stub = folder / "slurm", folder / "bin" / "srun"
    stub.parent.mkdir()
    stub.write_text(SRUN)
    stub.chmod(0o755)
    words = [
        str(ROOT / "scripts/pretrain_gpt2.slurm"),
        *flags(folder),
        "--save",
        str(save),
        "--model-parallel-size",
        "2",
    ]
    slurm = {
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_JOB_ID": str(os.getpid()),
        "MAX_REQUEUES": "0",
    }
    path = f"{stub.parent}:{python.path}"
    job = program(folder, "bash", *words, MASTER_ADDR="localhost", PATH=path, **slurm)
    job.wait(240)
    output = (folder / "output").read_text()
    assert job.returncode == 0, output
    assert losses(save) == pytest.approx(single, rel=1e-5)
    for line in (
        "host node003: ranks 0-1 of 4 on cpu (1 thread each)",
        "host node004: ranks 2-3 of 4 on cpu (1 thread each)",
    ):
        assert output.splitlines().count(line) == 1, output


# If there is a GPU, ranks are spawned instead of forked.
WITH_CUDA = (
    "import sys, torch; from megatron.gpt2.commands.pretrain_gpt2 import main\n"
    "torch.cuda.device_count = lambda: 2\nsys.exit(main(sys.argv[1:]))"
)


@pytest.mark.parametrize("way, how", {"Ctrl-C": "forked", "SIGTERM": "spawned", "a rank is killed": "forked"}.items())
def test_torch_multiprocessing(folder: Path, single: list[float], way: str, how: str) -> None:
    """--nproc-per-node trains the same and ends in each of the ways. The test reads the output to know when to act."""
    save = folder / f"{how} {way}"
    words = ["--save", str(save), *"--nproc-per-node 2 --exit-interval 100000 --train-iters 100000".split()]
    if how == "spawned":
        job = program(folder, sys.executable, "-c", WITH_CUDA, *flags(folder), *words, PYTHONPATH=str(ROOT))
        pid, path = job.pid, folder / "output"
    else:
        rank = StartedRank(folder, words, {})
        assert rank.process.pid is not None
        pid, path = rank.process.pid, rank.output
    end = time.monotonic() + 240
    while "iteration        5/" not in path.read_text():
        assert time.monotonic() < end, path.read_text()
        time.sleep(0.05)
    assert losses(save)[:5] == pytest.approx(single, rel=1e-5), path.read_text()
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    if how == "spawned":
        children = [child for child in children if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]
    assert len(children) == 2
    if way == "Ctrl-C":
        for process in (pid, *children):  # A terminal also sends the signal to all of them.
            os.kill(process, signal.SIGINT)
    else:
        os.kill(*((pid, signal.SIGTERM) if way == "SIGTERM" else (children[1], signal.SIGKILL)))
    code = job.wait(240) if how == "spawned" else rank.end()[0]
    output = path.read_text()
    assert not any(Path(f"/proc/{child}").exists() for child in children)
    assert "Traceback" not in output
    if way == "a rank is killed":
        assert code == 128 + signal.SIGKILL, output
        assert "error: rank 1 was ended by SIGKILL\n" in output
        assert "rank 1 (" in output and "sent no heartbeat" in output
    else:
        assert code == 0, output
        assert f"stopped by {way} at iteration" in output


def as_on_a_mac() -> None:
    """Remove everything that only Linux and glibc have: /proc, /sys, and some functions of `os`."""

    def without(real: Callable[..., Any]) -> Callable[..., Any]:
        def function(path: Any, *args: Any, **options: Any) -> Any:
            if str(path).startswith(("/proc", "/sys")):
                raise FileNotFoundError(errno.ENOENT, "does not exist on a Mac", str(path))
            return real(path, *args, **options)

        return function

    io.open = builtins.open = without(open)
    os.stat = without(os.stat)
    platform.libc_ver = lambda *args, **options: ("", "")
    for name in ("sched_getaffinity", "posix_fadvise", "posix_fallocate", "memfd_create"):
        delattr(os, name)


def test_without_linux(folder: Path, single: list[float]) -> None:
    """The test simulates macOS."""
    save, place = folder / "mac", f"tcp://localhost:{free_port()}"
    words = f"--save {save} --world-size 2 --init-method {place} --rank".split()
    outputs = finish([StartedRank(folder, [*words, str(rank)], {}, before=as_on_a_mac) for rank in range(2)])
    assert losses(save) == pytest.approx(single, rel=1e-5)
    assert "glibc" not in outputs[0]


def few_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))


def test_too_few_open_files(folder: Path) -> None:
    words = f"--save {folder}/few --nproc-per-node 2"
    assert StartedRank(folder, words.split(), {}, before=few_files).end() == (
        2,
        "error: this process may open 16 files, and each of 2 ranks needs up to 144: raise the limit (ulimit -n 144)\n",
    )


def test_ranks_with_different_data_end_with_one_line(folder: Path, tmp_path: Path) -> None:
    """No rank prints the C++ frames of a connection that another rank has closed."""
    other = write_text(tmp_path, 500)
    words = f"--save {folder}/differ --world-size 2 --init-method tcp://localhost:{free_port()} --rank".split()
    ranks = [StartedRank(folder, [*words, str(rank)], {}) for rank in range(1)]
    ranks.append(StartedRank(folder, [*words, "1", "--train-data", str(other)], {}))
    (first, said), second = [rank.end() for rank in ranks]
    assert first == 2, said
    assert said.splitlines()[-1] == "error: the ranks read different training data: every machine needs the same files"
    assert second[0] == 2 and not [line for line in second[1].splitlines() if not line.startswith("tokenis")], second


@pytest.mark.parametrize("flags, code", [("", 2), ("--elastic", 1)])
def test_exit_code_without_rank_0(folder: Path, flags: str, code: int) -> None:
    """With --elastic the network may come back, so launchers must try again."""
    words = f"--save {folder}/alone --rank 1 --world-size 2 --init-method tcp://localhost:{free_port()} {flags}"
    ended, said = StartedRank(folder, [*words.split(), "--init-timeout", "0.2"], {}).end()
    assert ended == code and re.fullmatch(r"error \(\S+\): rank 0 did not join within 0.2 s .*\n", said), said
