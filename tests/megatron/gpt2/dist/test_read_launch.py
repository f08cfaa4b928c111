"""Test rank and rendezvous address from flags or from a launcher's variables, and Slurm's host lists."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping

import pytest
import torch

from megatron.gpt2.dist.launch import Launch, expand_hosts, read_launch
from megatron.gpt2.dist.ranks import RankInfo

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "6000",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
PMI = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
STEP = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
    "SLURM_JOB_ID": "123456",
    "SLURMD_NODENAME": "node004",
    "SLURM_STEP_NODELIST": "node[003-004]",
}
SCRIPT = {name: value for name, value in STEP.items() if "STEP" not in name}  # A batch script has these variables.
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


def test_by_hand() -> None:
    found, words = read_launch(["--lr", "1", *BY_HAND.split(), "--init_timeout", "7", "--prompt", "a_b"], {})
    expected = Launch(1, 3, init_method="tcp://node1:6000", timeout=7.0, host=socket.gethostname())
    assert found == expected and words == ["--lr", "1", "--prompt", "a_b"]  # Other code reads these flags.


def test_torchrun_keeps_the_store() -> None:
    found = launch(TORCHRUN)
    assert found.use_agent_store and found.init_method == "tcp://node1:6000"
    assert launch({**TORCHRUN, "MASTER_ADDR": "fd00::1"}).init_method == "tcp://[fd00::1]:6000"
    for bad in ("tcp://fd00::1", "tcp://[fd00::1", "tcp://[fd00::1]"):
        with pytest.raises(
            ValueError, match=rf"bad rendezvous address {re.escape(bad)}: give tcp://HOST:PORT .*for IPv6"
        ):
            launch(TORCHRUN, f"--init-method {bad}")
    assert launch(TORCHRUN, "--init-method file:///here").init_method == "file:///here"
    assert launch({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}).local is None


def test_mpi_meets_where_it_can_know() -> None:
    assert launch({**OPEN_MPI, "MASTER_PORT": "6000"}).init_method == "tcp://localhost:6000"
    assert launch({**PMI, "SLURM_JOB_NODELIST": "n[7-8]", "MASTER_PORT": "6000"}).init_method == "tcp://n7:6000"
    first, second = ({**OPEN_MPI, "PMIX_NAMESPACE": f"prterun-host-{job}@1"} for job in (17, 18))
    assert 1024 < port(first) < 32768 and port(first) != port(second)


def test_slurm_step() -> None:
    found = launch(STEP)
    assert found.hosts == ("node003",) * 4 + ("node004",) * 3 and found.host == "node004"
    first = launch({**STEP, "SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_LOCALID": "0"})
    assert found.init_method == first.init_method and found.init_method.startswith("tcp://node003:")
    assert 1024 < port(STEP) < 32768 and port({**STEP, "SLURM_JOB_ID": "123457"}) != port(STEP)
    assert launch({**STEP, "MASTER_ADDR": "here", "MASTER_PORT": "6000"}).init_method == "tcp://here:6000"
    assert launch({**STEP, "SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_NODEID": "2"}).rank_info() == RankInfo(
        5, 7, 1, 2
    )
    # One of the two variables says how many tasks there are.
    for name in ("SLURM_NTASKS", "SLURM_STEP_TASKS_PER_NODE"):
        without = {key: value for key, value in STEP.items() if key != name}
        assert (launch(without).rank, launch(without).world_size) == (5, 7)
        assert launch(without).local == ((1, 3) if name == "SLURM_NTASKS" else None)


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
    assert "PBS_JOBID=7.host" in launch({"PBS_JOBID": "7.host"}).notice
    assert launch(SCRIPT, "--nproc-per-node 2").notice == ""


@pytest.mark.parametrize(
    "argv, environ, message",
    [
        ("", {"RANK": "x", "WORLD_SIZE": "2"}, "RANK=x in the environment is not a number"),
        ("", {"RANK": "2", "WORLD_SIZE": "2"}, "rank 2 of 2"),
        ("", {**TORCHRUN, "LOCAL_RANK": "3"}, "local rank 3 of 2"),
        (
            "",
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1"},
            "no rendezvous address for the 2 ranks: set MASTER_ADDR",
        ),
        ("", PMI, "no rendezvous address for the 4 ranks"),
        ("", {**TORCHRUN, "MASTER_PORT": "http"}, "bad rendezvous address tcp://node1:http"),
        ("", {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, "neither SLURM_NTASKS nor SLURM_STEP_TASKS_PER_NODE"),
        ("--rank 0", {}, "--rank and --world-size must be given together"),
        ("--rank 0 --world-size 2", {}, "--rank needs --init-method"),
        ("--rank 2 --world-size 2 --init-method tcp://a:1", {}, r"--rank 2 is not in \[0, 2\)"),
        ("--rank 0 --world-size 2 --init-method tcp://a", {}, "bad rendezvous address tcp://a: give tcp://HOST:PORT"),
        ("--rank 0 --world-size 2 --init-method file://a/b", {}, "bad rendezvous address file://a/b"),
        ("--init-method tcp://a:1", {}, "--init-method needs --rank and --world-size"),
        ("--nproc-per-node 2 --rank 0 --world-size 2", {}, "--nproc-per-node starts all ranks itself"),
        ("--nproc-per-node 2 --nnodes 2 --node-rank 2", {}, r"--node-rank 2 is not in \[0, 2\): change it or --nnodes"),
        ("--nnodes 2", {}, "--nnodes needs --nproc-per-node"),
        ("--nproc-per-node 2 --nnodes 2", {}, "no rendezvous address for the 4 ranks: set MASTER_ADDR"),
        (
            "--nproc-per-node 2 --nnodes 2",
            {"MASTER_ADDR": "a", "MASTER_PORT": "http"},
            "bad rendezvous address tcp://a:http",
        ),
        ("--nproc-per-node 2", TORCHRUN, "a launcher has started this process as one of 4 already"),
        ("--init-timeout 0", {}, "--init-timeout must be positive"),
    ],
)
def test_errors_of_launch_settings(argv: str, environ: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        launch(environ, argv)


@pytest.mark.parametrize(
    "flags, gpus, starts",
    [
        ("--nproc-per-node 4", 0, 4),
        ("--nproc_per_node=1", 0, 0),  # This process is the rank.
        ("--nproc-per-node 0", 0, 2),
        ("--nproc-per-node 0", 1, 0),
        ("--nproc-per-node 0", 8, 8),
    ],
)
def test_ranks_to_start(flags: str, gpus: int, starts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert launch({}, flags).ranks_to_start == starts


def test_ranks_to_start_on_several_machines() -> None:
    found = launch({"MASTER_ADDR": "a"}, "--nproc-per-node 4 --nnodes 3 --node-rank 1")
    assert (found.ranks_to_start, found.rank, found.world_size, found.init_method) == (4, 4, 12, "tcp://a:29500")
    found = launch({}, "--nproc-per-node 1 --nnodes 3 --node-rank 1 --init-method file:///m")
    assert (found.ranks_to_start, found.rank, found.world_size, found.local, found.init_method) == (
        0,
        1,
        3,
        (0, 1),
        "file:///m",
    )


@pytest.mark.parametrize(
    "text, hosts",
    {
        "": [],
        "localhost": ["localhost"],
        "a1,b2": ["a1", "b2"],
        "node[003-005,010]": ["node003", "node004", "node005", "node010"],
        "n[9-11]-ib,login": ["n9-ib", "n10-ib", "n11-ib", "login"],
        "rack[1-2]n[01-02]": ["rack1n01", "rack1n02", "rack2n01", "rack2n02"],
        "gpu-a-7,gpu-a-[8,10]": ["gpu-a-7", "gpu-a-8", "gpu-a-10"],
    }.items(),
)
def test_hosts_of_a_slurm_list(text: str, hosts: list[str]) -> None:
    assert expand_hosts(text) == hosts
