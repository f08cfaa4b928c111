"""Two machines for real: network namespaces with a host name and an address each and a cable between them, two ranks
on each, model-parallel inside and data-parallel across."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.megatron.gpt2.dist.started_ranks import Rank, losses
from tests.megatron.gpt2.train.training_runs import write_text

HOSTS = ("left", "right")


def ip(*words: str) -> None:
    try:
        subprocess.run(["ip", *words], check=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    except FileNotFoundError:
        pytest.skip("the program ip is not installed")


@pytest.fixture
def machines() -> Iterator[tuple[str, str]]:
    left, right = (f"{name}{os.getpid()}" for name in HOSTS)
    try:
        try:
            ip("netns", "add", left)
            ip("netns", "add", right)
            ip("link", "add", "cable0", "netns", left, "type", "veth", "peer", "name", "cable0", "netns", right)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this machine lends no network namespaces: {error.stdout.strip()}")
        for number, name in enumerate((left, right), start=1):
            ip("-n", name, "address", "add", f"10.77.0.{number}/24", "dev", "cable0")
            for link in ("lo", "cable0"):
                ip("-n", name, "link", "set", link, "up")
        yield left, right
    finally:
        for name in (left, right):
            subprocess.run(["ip", "netns", "delete", name], stderr=subprocess.DEVNULL, check=False)


def start(folder: Path, machines: tuple[str, str], *words: str) -> list[Rank]:
    """On each machine the process that starts its two ranks."""
    return [
        Rank(
            folder,
            [*f"--model-parallel-size 2 --nproc-per-node 2 --nnodes 2 --node-rank {node}".split(), *words],
            {"MASTER_ADDR": "10.77.0.1"},
            machines[node],
        )
        for node in range(2)
    ]


def test_two_machines_train_and_a_cut_cable_is_named(tmp_path: Path, machines: tuple[str, str]) -> None:
    write_text(tmp_path)
    left, right = machines
    alone = Rank(tmp_path, ["--save", f"{tmp_path}/alone"], {}).end()
    assert alone[0] == 0, alone[1]
    endless = "--exit-interval 100000 --train-iters 100000 --distributed-timeout-minutes 0.1"
    nodes = start(tmp_path, machines, "--save", f"{tmp_path}/cut", *endless.split())
    metrics = tmp_path / "cut" / "metrics.jsonl"
    for _ in range(600):
        if metrics.exists() and len(losses(metrics.parent)) >= 5:
            break
        assert nodes[0].process.is_alive(), nodes[0].end()[1]
        time.sleep(0.1)
    ip("-n", left, "link", "set", "cable0", "down")
    cut = time.monotonic()
    ended = [node.end(60) for node in nodes]
    seconds = time.monotonic() - cut
    outputs = [output for _, output in ended]
    assert [code for code, _ in ended] == [1, 1], "\n".join(outputs)
    assert seconds < 30, seconds
    assert losses(metrics.parent)[:5] == pytest.approx(losses(tmp_path / "alone"), rel=1e-5)
    assert f"{left}: ranks 0-1 of 4 on cpu" in outputs[0] and f"{right}: ranks 2-3 of 4 on cpu" in outputs[1]
    assert f"error ({left}): ranks 2-3 ({right}) gave no sign of life" in outputs[0]
    assert f"error ({right}): rank 0 ({left}) gave no sign of life" in outputs[1]
    assert all("Traceback" not in output and output.count("error (") == 1 for output in outputs)
