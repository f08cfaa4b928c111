"""Test what docs/how-to/clusters.md says about several hosts: how they start and find each other, and what happens if a
host or the network fails."""

from __future__ import annotations

import errno
import itertools
import re
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from megatron.gpt2.checkpoint import lease, saver, writer
from megatron.gpt2.checkpoint.save_folder import find_checkpoint
from megatron.gpt2.commands.pretrain_gpt2 import main
from megatron.gpt2.monitor.html_report import METRICS
from megatron.gpt2.monitor.incidents import read_records
from tests.cluster.hosts import Hosts, torchrun
from tests.megatron.gpt2.dist.started_ranks import StartedRank, losses
from tests.megatron.gpt2.train.training_runs import write_text

pytestmark = pytest.mark.cluster
TWO = "--nnodes 2 --nproc-per-node 1 --init-timeout 4"
ENDLESS = "--exit-interval 100000 --train-iters 100000"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_text(tmp_path, 1000)
    return tmp_path


@pytest.fixture(scope="module")
def on_one_host(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Return the losses of five steps of one process."""
    folder = tmp_path_factory.mktemp("one")
    write_text(folder, 1000)
    assert StartedRank(folder, ["--save", f"{folder}/save"], {}).end()[0] == 0
    return losses(folder / "save")


def wait_for(condition: Callable[[], object], runs: Mapping[int, StartedRank], seconds: float = 200) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "\n".join(run.output.read_text() for run in runs.values())
        time.sleep(0.05)


@dataclass
class Start:
    """A case of `test_start`: two hosts start to train, or end with an error.

    environ: environment variables, with {0} and {1} for the addresses of the hosts.
    says: a pattern in the output of one of the hosts; "" if the hosts train.
    number: the flag that gives each host its number.
    change: a function that changes the hosts before the start.
    """

    name: str
    environ: Mapping[str, str] = field(default_factory=lambda: {"MASTER_ADDR": "{0}"})
    says: str = ""
    words: str = TWO
    number: str = "--node-rank"
    change: Callable[[Hosts], object] = str
    network: int = 0  # the network in which the hosts have the addresses {0} and {1}
    networks: int = 1
    family: int = 4


def program_of(words: str) -> Callable[[Sequence[str]], int]:
    """Return torchrun if `words` has flags of torchrun, which follow "--", and else the training program."""
    return torchrun if "-- " in words else main


BLOCKED = "nothing answers at 10.77.0.1:29500, as seen from node2 "
STARTS = [
    Start("flags per host", words=TWO + " --nproc-per-node 2 --model-parallel-size 2"),
    Start("a process per rank", {}, words="--world-size 2 --init-method tcp://{0}:29500", number="--rank"),
    Start("torchrun per host", {}, words="-- --nnodes 2 --nproc-per-node 1 --master-addr {0}"),
    Start("a file in a shared folder", {}, words=TWO + " --init-method file://{folder}/meet"),
    Start("IPv6 only", family=6),
    Start(
        "a host name that is 127.0.0.1 on all",
        change=lambda hosts: hosts.set_names({"node1": "127.0.0.1", "node2": "127.0.0.1"}),
    ),
    Start(
        "a host name that is 127.0.1.1 on its host",
        {"MASTER_ADDR": "node1"},
        change=lambda hosts: hosts.set_names({"node1": "127.0.1.1", "node2": "127.0.1.1"}, {"node1": "10.77.0.1"}),
    ),
    Start("the second of two networks", change=lambda hosts: hosts.unplug(0), network=1, networks=2),
    Start(
        "names lead to the network that is cut",
        {"MASTER_ADDR": "node1"},
        r"node1:29500, as seen from node2 \((timed out|No route to host)\)",
        change=lambda hosts: hosts.unplug(0),
        networks=2,
    ),
    Start(
        "gloo's interface is in the network that is cut",
        {"MASTER_ADDR": "{0}", "GLOO_SOCKET_IFNAME": "eth0"},
        r"this rank cannot connect to others \(.*No route to host",
        change=lambda hosts: hosts.unplug(0),
        network=1,
        networks=2,
    ),
    Start(
        "an address that nobody has",
        {"MASTER_ADDR": "10.77.0.9"},
        r"nothing answers at 10.77.0.9:29500, as seen from node2 \((timed out|No route to host)\)",
    ),
    Start(
        "the address of the other host",
        {"MASTER_ADDR": "{1}"},
        "MASTER_ADDR or --init-method has to name the machine of rank 0",
    ),
    Start(
        "the port drops packets",
        says=re.escape(BLOCKED + "(timed out)"),
        change=lambda hosts: hosts.block(0, "tcp dport 29500 drop"),
    ),
    Start(
        "only the rendezvous port is open",
        says="node[12] and node[12] cannot connect to each other: open all ports",
        change=lambda hosts: hosts.block(0, "tcp flags & (syn | ack) == syn tcp dport != 29500 drop"),
    ),
]


@pytest.mark.parametrize("case", STARTS, ids=lambda case: case.name)
def test_start(folder: Path, on_one_host: list[float], case: Start) -> None:
    with Hosts(folder, networks=case.networks, family=case.family) as hosts:
        case.change(hosts)
        places = [hosts.address(host, case.network) for host in range(2)]
        environ = {name: value.format(*places) for name, value in case.environ.items()}
        words = f"--save {folder}/save {case.words.format(*places, folder=folder)}"
        runs = {
            host: hosts.start(host, f"{words} {case.number} {host}", environ, program=program_of(words))
            for host in range(2)
        }
        ended = [run.end(60) for run in runs.values()]
        output = "\n".join(text for _, text in ended)
        print(case.name, ended)
        if case.says:
            assert {code for code, _ in ended} <= {1, 2} and re.search(case.says, output), ended
            assert "Traceback" not in output, output
        else:
            assert [code for code, _ in ended] == [0, 0], output
            assert losses(folder / "save") == pytest.approx(on_one_host, rel=1e-5)


@dataclass
class Loss:
    """A case of `test_a_lost_host`: two hosts with a rank each train and save, until one host is lost.

    then: what happens after the loss: the run "ends", "ends on both" or "goes on", or the lost host "returns".
    """

    name: str
    host: int = 1  # the lost host
    lose: Callable[[Hosts, int], object] = Hosts.vanish
    words: str = TWO
    in_save: bool = False
    then: str = "ends"


def hold_in_save() -> None:
    """Let a rank stop in its save, before it writes its files."""
    mock.patch.object(writer, "write_safetensors", lambda *args: time.sleep(600)).start()


# the error that the other host prints, for each lost host
NO_HEARTBEAT = [
    rf"error \(node{2 - host}\): rank {host} \(node{host + 1}\) sent no heartbeat for \d+ s" for host in range(2)
]
RESTARTS = TWO + " --max-restarts 3"
ELASTIC = RESTARTS + " --elastic"
UNDER_TORCHRUN = "-- --nnodes 2 --nproc-per-node 1"
LOSSES = [
    Loss("a host vanishes"),
    Loss("the host of rank 0 vanishes", host=0),
    Loss("a host vanishes in a save", in_save=True),
    Loss("the host of rank 0 vanishes in a save", host=0, in_save=True),
    Loss("a host is suspended", lose=partial(Hosts.kill, number=signal.SIGSTOP)),
    Loss("the network is cut", lose=Hosts.unplug, then="ends on both"),
    Loss("a host vanishes under torchrun", words=UNDER_TORCHRUN),
    Loss("a host vanishes and comes back", words=RESTARTS, then="returns"),
    Loss("a host vanishes, --elastic", words=ELASTIC, then="goes on"),
    Loss("a host vanishes and comes back, --elastic", words=ELASTIC, then="returns"),
]


def check_records(save: Path) -> None:
    """Check that metrics.jsonl has each iteration once, in order."""
    found = [record["iteration"] for record in read_records(save / METRICS) if "split" not in record]
    assert found == list(range(1, len(found) + 1))


def iteration(save: Path) -> int:
    """Return the newest iteration in metrics.jsonl."""
    return len(losses(save)) if (save / "metrics.jsonl").exists() else 0


def wait_for_save(save: Path, steps: int, runs: Mapping[int, StartedRank]) -> None:
    """Wait until a run that saves every 20 steps has saved `steps` steps after its last save."""
    wait_for((save / f"iter_{iteration(save) // 20 * 20 + steps:07d}").exists, runs)


@pytest.mark.parametrize("case", LOSSES, ids=lambda case: case.name)
def test_a_lost_host(folder: Path, case: Loss) -> None:
    save, by_torchrun = folder / "save", case.words == UNDER_TORCHRUN
    with Hosts(folder) as hosts:

        def start(host: int, prepare: Callable[[], object] = int) -> StartedRank:
            words = f"--save {save} --save-interval 20 {ENDLESS} {case.words} --node-rank {host}"
            words += f" --master-addr {hosts.address(0)}" * by_torchrun
            environ = {"MASTER_ADDR": hosts.address(0)}
            return hosts.start(host, words, environ, prepare=prepare, program=program_of(words))

        lost, named = case.host, 1 - case.host
        runs = {host: start(host, hold_in_save if case.in_save and host == lost else int) for host in range(2)}
        wait_for(lambda: any(save.glob("iter_*.tmp-*")) if case.in_save else (save / "iter_0000020").exists(), runs)
        case.lose(hosts, lost)
        began = time.monotonic()
        wait_for(lambda: re.search(NO_HEARTBEAT[lost], runs[named].output.read_text()), runs, 60)
        print(f"{case.name}: named after {time.monotonic() - began:.0f} s")
        if case.then == "returns":
            hosts.plug(1)
            runs[2] = start(1)
            wait_for(lambda: runs[2].output.read_text().count("host node2: rank 1 of 2"), runs)
        if case.then in ("returns", "goes on"):
            wait_for_save(save, 40, runs)
            hosts.kill(0, signal.SIGTERM)
            assert runs[0].end(60)[0] == 0
        else:
            code, output = runs[named].end(60)
            assert code == 1 and ("Traceback" not in output or by_torchrun), output
            if case.then == "ends on both":
                code, output = runs[lost].end(60)
                assert code == 1 and re.search(NO_HEARTBEAT[named], output), output
        assert find_checkpoint(save, log=pytest.fail) or case.in_save
        check_records(save)
        print(case.name, [run.output.read_text() for run in runs.values()])


def test_a_link_that_drops_for_a_moment(folder: Path) -> None:
    with Hosts(folder) as hosts:
        words = f"--save {folder}/save {ENDLESS} {TWO} --node-rank"
        runs = {host: hosts.start(host, f"{words} {host}", {"MASTER_ADDR": hosts.address(0)}) for host in range(2)}
        wait_for(lambda: iteration(folder / "save") > 3, runs)
        hosts.unplug(1)
        time.sleep(5)
        hosts.plug(1)
        before = iteration(folder / "save")
        wait_for(lambda: iteration(folder / "save") > before + 3, runs)


def test_a_link_between_two_other_hosts_is_cut(folder: Path) -> None:
    """If the link between the second and the third host is cut, a run ends with an error that names both, although both
    still reach the first host."""
    # Import `report` only here, because the ranks import test_cluster.py and do not need it.
    from megatron.gpt2.extensions.post_mortem.command import report

    with Hosts(folder, 3) as hosts:
        words = f"--save {folder}/save {ENDLESS} --distributed-timeout-minutes 0.1 --global-batch-size 3"
        place = f"--world-size 3 --init-method tcp://{hosts.address(0)}:29500 --rank"
        runs = {host: hosts.start(host, f"{words} {place} {host}") for host in range(3)}
        wait_for(lambda: iteration(folder / "save") > 3, runs)
        hosts.cut(1, 2)
        ended = [run.end(90) for run in runs.values()]
        for host, (code, output) in enumerate(ended):
            line = rf"error \(node{host + 1}\): a collective took longer .*: node[23] and node[23] cannot connect"
            assert code == 1 and re.search(line, output) and "Traceback" not in output, output
        assert report(folder / "save")[0].kind == "lost link"


@dataclass
class Partition:
    """Three hosts train with --elastic until the network between `left` and the others is cut. All hosts still reach
    the storage, and a supervisor on each side starts its hosts again, with a separate rendezvous.

    locks: whether the storage has file locks. Without them, host 0 is suspended until the other side has saved.
    left: the hosts on one side of the cut; host 0 has rank 0.
    moment: when the network is cut: in a "step", while host 2 writes the "files" of a checkpoint, or between the check
        and the "commit" of rank 0.
    """

    locks: bool
    left: tuple[int, ...]
    moment: str


def prepare(folder: Path, case: Partition, host: int) -> None:
    """In the second save of all three hosts, let host 0 or 2 wait at `case.moment` until the file "go" exists."""
    count = itertools.count()

    def hold() -> None:
        if dist.is_initialized() and dist.get_world_size() == 3 and next(count) == 1:
            (folder / "inside").touch()
            while not (folder / "go").exists():
                time.sleep(0.05)

    def commit_late(*args: Any) -> None:
        def check_and_hold() -> None:
            args[-1]()
            hold()

        commit(*args[:-1], check_and_hold)

    def write_late(*args: Any) -> bytes:
        hold()
        return write(*args)

    commit: Callable[..., None] = writer.commit
    write = writer.write_rank_files
    if not case.locks:  # Some network file systems have no locks.
        mock.patch.object(lease, "try_lock", side_effect=OSError(errno.ENOLCK, "No locks available")).start()
    if case.moment == "commit" and host == 0:
        mock.patch.object(saver, "commit", commit_late).start()
    if case.moment == "files" and host == 2:
        mock.patch.object(saver, "write_rank_files", write_late).start()


class Side(threading.Thread):
    """A thread that restarts the hosts on one side of a cut, without the other hosts, until `stop` is set."""

    def __init__(
        self, start: Callable[[int, str], StartedRank], side: Sequence[int], runs: Mapping[int, StartedRank]
    ) -> None:
        super().__init__(daemon=True)
        self._start_host, self._side, self.runs, self.stop = start, side, [list(runs.values())], threading.Event()

    def run(self) -> None:
        for attempt in itertools.count():
            while any(run.process.is_alive() for run in self.runs[-1]):
                if self.stop.wait(1):
                    return
            words = f"--nnodes {len(self._side)}"
            if len(self._side) > 1:
                words += f" --init-method file://{{folder}}/meet_{self._side[0]}_{attempt}"
            self.runs.append([self._start_host(host, f"{words} --node-rank {n}") for n, host in enumerate(self._side)])


PARTITIONS = [
    Partition(True, (0,), "step"),
    Partition(False, (0,), "commit"),
    Partition(False, (0, 1), "files"),
    Partition(False, (0, 1), "commit"),
]


@pytest.mark.parametrize("case", PARTITIONS, ids=str)
def test_a_partition_has_one_writer(folder: Path, case: Partition) -> None:
    """After a cut, each iteration is committed and recorded once, in order. The side that ends is started again."""
    save, sides = folder / "save", (case.left, tuple({0, 1, 2} - set(case.left)))
    with Hosts(folder, 3) as hosts:

        def start(host: int, words: str, first: bool = False) -> StartedRank:
            flags = f"--save {save} --save-interval 20 {ENDLESS} --nproc-per-node 1 --init-timeout 5 --max-restarts 20"
            flags += f" --elastic --global-batch-size 6 {words.format(folder=folder)}"
            act = partial(prepare, folder, case if first else replace(case, moment="step"), host)
            return hosts.start(host, flags, prepare=act)

        words = "--nnodes 3 --init-method file://{folder}/meet --node-rank"
        runs = {host: start(host, f"{words} {host}", first=True) for host in range(3)}
        if case.moment == "step":
            wait_for(lambda: "rank 2 of 3 on cpu" in runs[2].output.read_text() and iteration(save) > 25, runs)
        else:
            wait_for((folder / "inside").exists, runs)
        for one, other in itertools.product(*sides):
            hosts.cut(one, other)
            hosts.cut(other, one)
        supervisors = [Side(start, side, {host: runs[host] for host in side}) for side in sides]
        for supervisor in supervisors:
            supervisor.start()
        try:
            stands_still = case.moment == "commit" and not case.locks
            if stands_still:
                hosts.kill(0, signal.SIGSTOP)
                wait_for_save(save, 60, runs)
            (folder / "go").touch()
            hosts.kill(0, signal.SIGCONT)
            wait_for_save(save, 60, runs)
            if stands_still:
                assert "now belongs to" in runs[0].output.read_text()
        finally:
            for supervisor in supervisors:
                supervisor.stop.set()
                supervisor.join()
            for host in range(3):
                hosts.kill(host, signal.SIGTERM)
            outputs = [[run.end(60)[1] for run in group] for side in supervisors for group in side.runs]
        check_one_history(save, [text for group in outputs for text in group])


def check_one_history(save: Path, outputs: Sequence[str]) -> None:
    """Check that each iteration was committed by one run and recorded once, and that the newest checkpoint is valid."""
    saved = [name for text in outputs for name in re.findall(r"saved \S+/(iter_\d+)", text)]
    assert len(saved) == len(set(saved)), sorted(saved)
    assert sorted(saved) == sorted(path.name for path in save.glob("iter_???????"))
    assert not list(save.glob("*.old-*")), "an iteration was moved aside"
    newest = find_checkpoint(save, log=pytest.fail)
    assert newest.path.name == max(saved)
    check_records(save)
    assert not any("Traceback" in text for text in outputs), outputs
