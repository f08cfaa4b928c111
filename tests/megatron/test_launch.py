"""Ranks from torchrun's and Slurm's variables; hosts of a Slurm list; a world that meets."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest
import torch.distributed as dist

from megatron.launch import Ranks, expand_hosts, initialize_distributed, set_rendezvous, shutdown

STEP = {"SLURM_PROCID": "5", "SLURM_NTASKS": "7", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_STEP_ID": "0",
        "SLURM_STEP_TASKS_PER_NODE": "4,3", "SLURM_JOB_ID": "123456", "SLURMD_NODENAME": "node004",
        "SLURM_STEP_NODELIST": "node[003-004]"}


def test_a_plain_process_is_alone():
    assert Ranks.from_environment({}) == Ranks(0, 1, 0, 1)


def test_torchrun_comes_before_slurm():
    torchrun = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert Ranks.from_environment({**STEP, **torchrun}) == Ranks(3, 4, 1, 2)
    assert Ranks.from_environment({"RANK": "3", "WORLD_SIZE": "4"}) == Ranks(3, 4, 3, 4)


def test_slurm_step():
    assert Ranks.from_environment(STEP) == Ranks(5, 7, 1, 3)
    three_alike = {**STEP, "SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_NODEID": "2"}
    assert Ranks.from_environment(three_alike) == Ranks(5, 7, 1, 2)
    bare = {"SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "SLURM_JOB_NODELIST": "a,b"}
    assert Ranks.from_environment(bare) == Ranks(1, 4, 1, 2)


def test_plain_python_in_a_slurm_allocation_is_alone():
    batch_script = {name: value for name, value in STEP.items() if "STEP" not in name}
    assert Ranks.from_environment(batch_script) == Ranks()
    assert Ranks.from_environment({**STEP, "SLURM_STEP_ID": str(0xFFFFFFFA)}) == Ranks()  # an interactive shell
    assert Ranks.from_environment({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4"}) == Ranks()  # salloc


@pytest.mark.parametrize("environ, message", [
    ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK=x in the environment is not a number"),
    ({"RANK": "2", "WORLD_SIZE": "2"}, "rank 2 of 2"),
    ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "2"}, "local rank 3 of 2"),
])
def test_bad_variables(environ, message):
    with pytest.raises(ValueError, match=message):
        Ranks.from_environment(environ)


@pytest.mark.parametrize("text, hosts", [
    ("", []),
    ("localhost", ["localhost"]),
    ("a1,b2", ["a1", "b2"]),
    ("node[003-005,010]", ["node003", "node004", "node005", "node010"]),
    ("n[9-11]-ib,login", ["n9-ib", "n10-ib", "n11-ib", "login"]),
    ("rack[1-2]n[01-02]", ["rack1n01", "rack1n02", "rack2n01", "rack2n02"]),
    ("gpu-a-7,gpu-a-[8,10]", ["gpu-a-7", "gpu-a-8", "gpu-a-10"]),
])
def test_hosts_of_a_slurm_list(text, hosts):
    assert expand_hosts(text) == hosts


def test_slurm_ranks_meet_at_the_first_host():
    environ = dict(STEP)
    set_rendezvous(Ranks.from_environment(environ), environ)
    assert environ["MASTER_ADDR"] == "node003" and 1024 < int(environ["MASTER_PORT"]) < 32768
    assert "GLOO_SOCKET_IFNAME" not in environ  # two machines
    again = {**STEP, "SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_LOCALID": "0"}
    set_rendezvous(Ranks.from_environment(again), again)
    assert again["MASTER_PORT"] == environ["MASTER_PORT"]
    given = {**STEP, "MASTER_ADDR": "here", "MASTER_PORT": "6000"}
    set_rendezvous(Ranks.from_environment(given), given)
    assert (given["MASTER_ADDR"], given["MASTER_PORT"]) == ("here", "6000")


def test_nowhere_to_meet():
    with pytest.raises(ValueError, match="MASTER_ADDR is not in the environment, so 2 ranks"):
        set_rendezvous(Ranks(0, 2, 0, 2), {"MASTER_PORT": "1"})


def test_a_world_of_one_has_no_process_group():
    initialize_distributed(Ranks(), "gloo", 1.0)
    assert not dist.is_initialized()
    shutdown()


WORLD = """
import torch, torch.distributed as dist
from megatron.launch import Ranks, initialize_distributed, shutdown
ranks = Ranks.from_environment()
initialize_distributed(ranks, "gloo", 1.0)
total = torch.tensor([float(ranks.rank + 1)])
dist.all_reduce(total)
shutdown()
print(ranks.world_size, ranks.local_world_size, total.item(), dist.is_initialized())
"""


def test_two_slurm_tasks_meet():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "RANK", "WORLD"))}
    slurm = {"SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "localhost", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    tasks = [subprocess.Popen([sys.executable, "-W", "error::UserWarning", "-c", WORLD], text=True,
                              env={**clean, **slurm, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE) for rank in range(2)]
    for task in tasks:
        out, err = task.communicate(timeout=60)
        assert (task.returncode, out.strip(), err) == (0, "2 2 3.0 False", "")
