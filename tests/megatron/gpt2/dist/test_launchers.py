"""Each way to start ranks trains the same five steps, and errors name the rank. Rank and rendezvous address are read
from flags or from the variables of a launcher."""

from __future__ import annotations

import builtins
import errno
import io
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.gpt2.dist.launch import Launch, read_launch
from megatron.gpt2.dist.ranks import RankInfo
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
    os.utime(write_text(folder), (1e9, 1e9))  # The program stores the hash of a file with an old mtime.
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
    words = f"bash {ROOT}/scripts/pretrain_gpt2.slurm --save {save} --model-parallel-size 2".split()
    slurm = variables(f"SLURM_SUBMIT_DIR={ROOT} SLURM_JOB_ID={os.getpid()} MAX_REQUEUES=0 MASTER_ADDR=localhost")
    job = program(folder, *words, *flags(folder), PATH=f"{stub.parent}:{python.path}", **slurm)
    job.wait(240)
    output = (folder / "output").read_text()
    assert job.returncode == 0, output
    assert losses(save) == pytest.approx(single, rel=1e-5)
    assert output.count("host node003: ranks 0-1 of 4 on cpu ") == 1, output


# A launcher spawns its ranks if there is a GPU, and otherwise forks them.
WITH_CUDA = (
    "import sys, torch; from megatron.gpt2.commands.pretrain_gpt2 import main\n"
    "torch.cuda.device_count = lambda: 2\nsys.exit(main(sys.argv[1:]))"
)


@pytest.mark.parametrize("way, how", {"Ctrl-C": "forked", "SIGTERM": "spawned", "a rank is killed": "forked"}.items())
def test_torch_multiprocessing(folder: Path, single: list[float], way: str, how: str) -> None:
    """A run with --nproc-per-node has the losses of one process, and ends as expected after a signal or a killed
    rank."""
    save = folder / f"{how} {way}"
    words = ["--save", str(save), *"--nproc-per-node 2 --exit-interval 100000 --train-iters 100000".split()]
    if how == "spawned":
        job = program(folder, sys.executable, "-c", WITH_CUDA, *flags(folder), *words, PYTHONPATH=str(ROOT))
        pid, path = job.pid, folder / "output"
    else:
        rank = StartedRank(folder, words, {})
        pid, path = rank.process.pid, rank.output
    end = time.monotonic() + 240
    while "iteration        5/" not in path.read_text():
        assert time.monotonic() < end, path.read_text()
        time.sleep(0.05)
    assert losses(save)[:5] == pytest.approx(single, rel=1e-5)
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    if how == "spawned":
        children = [child for child in children if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]
    assert len(children) == 2
    if way == "Ctrl-C":
        for process in (pid, *children):  # Like a terminal, send the signal to the launcher and to its ranks.
            os.kill(process, signal.SIGINT)
    else:
        os.kill(*((pid, signal.SIGTERM) if way == "SIGTERM" else (children[1], signal.SIGKILL)))
    code = job.wait(240) if how == "spawned" else rank.end()[0]
    output = path.read_text()
    assert not any(Path(f"/proc/{child}").exists() for child in children) and "Traceback" not in output
    if way == "a rank is killed":
        assert code == 128 + signal.SIGKILL and "error: rank 1 was ended by SIGKILL\n" in output, output
        assert "rank 1 (" in output and "sent no heartbeat" in output
    else:
        assert code == 0 and f"stopped by {way} at iteration" in output, output


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


@pytest.mark.parametrize("scheme, before", [("file", int), ("tcp", as_on_a_mac)], ids=["file", "tcp without Linux"])
def test_by_hand(folder: Path, single: list[float], scheme: str, before: Callable[[], object]) -> None:
    save, path = folder / scheme, folder / "store file"
    address = f"tcp://localhost:{free_port()}" if scheme == "tcp" else f"file://{path}"
    words = ["--save", str(save), "--world_size=2", "--init-method", address, "--rank"]
    outputs = finish([StartedRank(folder, [*words, str(rank)], {}, before=before) for rank in (1, 0)])
    assert losses(save) == pytest.approx(single, rel=1e-5)
    # Without a launcher, the rendezvous decides the local ranks.
    assert f"host {os.uname().nodename}: ranks 0-1 of 2 on cpu (1 thread each)\n" in outputs[1]
    assert outputs[0] == "" and not path.exists() and ("glibc" in outputs[1]) == (scheme == "file")


def test_too_few_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda kind: (16, 16))
    with pytest.raises(
        ValueError, match=r"this process may open 16 files, .* 2 ranks needs up to 144: raise the limit"
    ):
        launch({}, "--nproc-per-node 2")


def test_exit_code_without_rank_0(folder: Path) -> None:
    """With --elastic the exit code is 1, so that launchers try again when the network may have returned."""
    words = f"--save {folder}/alone --elastic --rank 1 --world-size 2 --init-method tcp://localhost:{free_port()}"
    code, said = StartedRank(folder, [*words.split(), "--init-timeout", "0.2"], {}).end()
    assert code == 1 and re.fullmatch(r"error \(\S+\): rank 0 did not join within 0.2 s .*\n", said), said


def variables(line: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in line.split())


TORCHRUN = variables(
    "RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 MASTER_ADDR=node1 MASTER_PORT=6000 "
    "TORCHELASTIC_USE_AGENT_STORE=True"
)
OPEN_MPI = variables(
    "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2"
)
PMI = variables("PMI_RANK=2 PMI_SIZE=4 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=2")
STEP = variables(
    "SLURM_PROCID=5 SLURM_NTASKS=7 SLURM_LOCALID=1 SLURM_NODEID=1 SLURM_STEP_ID=0 SLURM_STEP_TASKS_PER_NODE=4,3 "
    "SLURM_JOB_ID=123456 SLURMD_NODENAME=node004 SLURM_STEP_NODELIST=node[003-004]"
)
SCRIPT = {name: value for name, value in STEP.items() if "STEP" not in name}  # the variables of a batch script
BY_HAND = "--rank 1 --world-size=3 --init-method tcp://node1:6000"


def launch(environ: Mapping[str, str], flags: str = "") -> Launch:
    return read_launch(flags.split(), environ)[0]


def port(environ: Mapping[str, str]) -> int:
    return int(launch(environ).init_method.rpartition(":")[2])


def test_the_first_launcher_wins() -> None:
    everything: dict[str, str] = {}
    alone = launch(everything)
    assert (alone.rank_info(), alone.notice, alone.host) == (RankInfo(), "", socket.gethostname())
    for names, ranks in (
        (STEP, RankInfo(5, 7, 1, 3)),
        (PMI, RankInfo(2, 4, 0, 2)),
        (OPEN_MPI, RankInfo(1, 2, 1, 2)),
        (TORCHRUN, RankInfo(3, 4, 1, 2)),
    ):
        everything |= names
        assert launch(everything).rank_info() == ranks
    assert launch(everything, BY_HAND).rank_info() == RankInfo(1, 3)


def test_flags_by_hand() -> None:
    found, words = read_launch(["--lr", "1", *BY_HAND.split(), "--init_timeout", "7", "--prompt", "a_b"], {})
    assert found == Launch(1, 3, init_method="tcp://node1:6000", timeout=7.0, host=socket.gethostname())
    assert words == ["--lr", "1", "--prompt", "a_b"]  # pretrain_gpt2.py parses the remaining flags.


def test_torchrun_keeps_the_store() -> None:
    found = launch(TORCHRUN)
    assert found.use_agent_store and found.init_method == "tcp://node1:6000"
    assert launch({**TORCHRUN, "MASTER_ADDR": "fd00::1"}).init_method == "tcp://[fd00::1]:6000"
    assert launch(TORCHRUN, "--init-method file:///here").init_method == "file:///here"
    assert launch(variables("RANK=0 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=1")).local is None


def test_mpi_meets_where_it_can_know() -> None:
    assert launch({**OPEN_MPI, "MASTER_PORT": "6000"}).init_method == "tcp://localhost:6000"
    assert launch({**PMI, "SLURM_JOB_NODELIST": "n[7-8]", "MASTER_PORT": "6000"}).init_method == "tcp://n7:6000"


def test_slurm_step() -> None:
    found = launch(STEP)
    assert found.host == "node004"
    first = launch({**STEP, "SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_LOCALID": "0"})
    assert found.init_method == first.init_method and found.init_method.startswith("tcp://node003:")
    for hosts, meets in (("n[9-11]-ib,login", "n9-ib"), ("rack[1-2]n[01,02]", "rack1n01")):
        assert launch({**STEP, "SLURM_STEP_NODELIST": hosts}).init_method.startswith(f"tcp://{meets}:")
    assert 1024 < port(STEP) < 32768 and port({**STEP, "SLURM_JOB_ID": "123457"}) != port(STEP)
    assert launch({**STEP, "SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_NODEID": "2"}).rank_info() == RankInfo(
        5, 7, 1, 2
    )
    # SLURM_NTASKS also gives the number of tasks.
    without = {key: value for key, value in STEP.items() if key != "SLURM_STEP_TASKS_PER_NODE"}
    assert (launch(without).rank, launch(without).world_size, launch(without).local) == (5, 7, None)


def test_plain_python_in_an_allocation_is_a_single_rank_with_a_notice() -> None:
    shell = {**STEP, "SLURM_STEP_ID": str(0xFFFFFFFA)}
    salloc = {"SLURM_JOB_ID": "123456", "SLURM_NTASKS": "4"}
    for environ in (SCRIPT, shell, salloc):
        found = launch(environ)
        assert found.rank_info() == RankInfo()
        assert found.notice == (
            "notice: this process runs as a single rank: it is in the allocation SLURM_JOB_ID=123456, but "
            "not started by srun, torchrun or --nproc-per-node"
        )
    assert launch(SCRIPT, "--nproc-per-node 2").notice == ""


@pytest.mark.parametrize(
    "line, message",
    {
        "RANK=x WORLD_SIZE=2": "RANK=x in the environment is not a number",
        "RANK=3 WORLD_SIZE=4 LOCAL_RANK=3 LOCAL_WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=1": "local rank 3 of 2",
        "RANK=0 WORLD_SIZE=2 MASTER_PORT=1": "no rendezvous address for the 2 ranks: set MASTER_ADDR",
        "RANK=0 WORLD_SIZE=2 MASTER_ADDR=node1 MASTER_PORT=http": "bad rendezvous address tcp://node1:http",
        "SLURM_PROCID=0 SLURM_LOCALID=0": "neither SLURM_NTASKS nor SLURM_STEP_TASKS_PER_NODE",
        "--rank 0": "--rank and --world-size must be given together",
        "--rank 0 --world-size 2": "--rank needs --init-method",
        "--rank 2 --world-size 2 --init-method tcp://a:1": r"--rank 2 is not in \[0, 2\)",
        "--rank 0 --world-size 2 --init-method tcp://fd00::1": "bad rendezvous address tcp://fd00::1: give tcp:",
        "--rank 0 --world-size 2 --init-method tcp://[fd00::1": r"bad rendezvous address tcp://\[fd00::1: give",
        "--rank 0 --world-size 2 --init-method file://a/b": "bad rendezvous address file://a/b",
        "--init-method tcp://a:1": "--init-method needs --rank and --world-size",
        "--nproc-per-node 2 --rank 0 --world-size 2": "--nproc-per-node starts all ranks itself",
        "--nproc-per-node 2 --nnodes 2 --node-rank 2": r"--node-rank 2 is not in \[0, 2\): change it or --nnodes",
        "--nnodes 2": "--nnodes needs --nproc-per-node",
        "RANK=3 WORLD_SIZE=4 --nproc-per-node 2": "a launcher has started this process as one of 4 already",
    }.items(),
)
def test_errors_of_launch_settings(line: str, message: str) -> None:
    environ, dashes, flags = line.partition("--")
    with pytest.raises(ValueError, match=message):
        launch(variables(environ), dashes + flags)


def test_ranks_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    # --nproc-per-node 1 starts no rank: the process itself is the rank.
    for count, gpus, starts in ((1, 0, 0), (0, 0, 2), (0, 1, 0), (0, 8, 8)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)  # noqa: B023
        assert launch({}, f"--nproc-per-node {count}").ranks_to_start == starts
    found = launch({"MASTER_ADDR": "a"}, "--nproc-per-node 4 --nnodes 3 --node-rank 1")
    assert (found.ranks_to_start, found.rank, found.world_size, found.init_method) == (4, 4, 12, "tcp://a:29500")
    assert launch({}, "--nproc-per-node 1 --nnodes 3 --init-method file:///m").local == (0, 1)
