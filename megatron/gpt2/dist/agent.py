"""--nproc-per-node: torch's elastic agent starts the ranks of this machine, and again if one fails (--max-restarts).

The same words are run again, and so the run goes on from its newest checkpoint. Over several machines the agents meet
before each round in a store that the first of them serves. A machine that comes, or that starts its ranks again, ends
the round of the others after their step and a save. With --elastic a round begins with the machines that are there.

`LocalElasticAgent` brings the rounds. Added to it are what a user reads and what post_mortem reads, exit codes, time
for the other ranks to name a lost one and to save, and the end of a crash loop.
"""

import json
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousInfo
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

from data_utils.command_line import how_to_call
from megatron.gpt2.dist.launch import Launch
from megatron.gpt2.dist.ranks import MissingRanks
from megatron.gpt2.dist.rendezvous import missing, open_store
from megatron.gpt2.monitor.incidents import Incidents, read_incidents
from megatron.gpt2.monitor.plots import read_records
from megatron.gpt2.monitor.run_report import METRICS

Program = Callable[[Sequence[str]], int]
REFUSED = 2
INTERRUPTED = 128 + signal.SIGINT
FINAL = (REFUSED, INTERRUPTED)  # exit codes after which ranks are not started again
LOOP = 3  # so often at the same iteration: what fails there fails every time
GRACE = 6.0  # seconds that the others have once one rank has ended: to name it, or to save
SAVING = 600  # seconds that ranks have to finish their step and save, when a machine has come
MEET_AGAIN = signal.SIGUSR2  # asks them to


@dataclass(frozen=True)
class Kept:
    """What a run keeps on the disk. folder: of --save. newest: the iteration of the newest checkpoint there, 0 where
    there is none."""

    folder: Path
    newest: Callable[[], int]

    def reached(self, since: float) -> int:
        """The iteration that the ranks have reached, as far as they have said so. since: when they were started, as
        `time.time()`."""
        said = [record["iteration"] for record in read_incidents(self.folder) if record["time"] >= since]
        logged = [record["iteration"] for record in read_records(self.folder / METRICS)[-1:]]
        return max([self.newest(), *said, *logged])


def start_ranks(program: Program, argv: Sequence[str], launch: Launch, kept: Kept | None = None) -> int:
    """Run `program(argv)` on `launch.starts` ranks of this machine, the first of which `launch` describes.

    Returns the exit code of the first rank that fails, else 0. If one fails, the others end too, after GRACE seconds
    at the latest, and all of them are started again `launch.max_restarts` times at most. SIGTERM and SIGUSR1 are passed
    on to them; Ctrl-C reaches them from the terminal. program: at the top level of a module, which the ranks import.
    The ranks get torchrun's variables and words for `read_launch`. kept: what a training program keeps.
    """
    logging.disable(logging.CRITICAL)  # torch's tracebacks of a rank that was killed
    # One store for all rounds; torch's own would be on another machine after each.
    os.environ |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "TORCHELASTIC_SIGNALS_TO_HANDLE": ""}
    place = replace(launch, where=launch.where or "tcp://127.0.0.1:0")
    with open_store(place, serves=launch.rank == 0) as (store, _server):
        agent = Agent(store, program, argv, launch, kept)
        before = {number: signal.signal(number, agent.asked_to_stop) for number in Agent.STOPS}
        try:
            agent.run()
        except RendezvousError:
            say("the machine of rank 0, in whose store all machines meet, does not answer")
            agent.code = 1
        except SystemExit:  # asked to stop between two rounds
            pass
        finally:
            logging.disable(logging.NOTSET)
            for number, handler in before.items():
                signal.signal(number, handler)
    return agent.code


class Machines(DynamicRendezvousHandler):
    """torch's rendezvous of the agents."""

    use_agent_store = True  # also for the ranks

    _waiting = 0

    def next_rendezvous(self) -> RendezvousInfo:
        """Begin a round."""
        self._waiting = 0
        return super().next_rendezvous()

    def _keep_alive(self) -> None:
        super()._keep_alive()
        self._waiting = len(self._state_holder.state.wait_list)

    def num_nodes_waiting(self) -> int:
        """As of the last sign of life: behind a cut cable torch's own would keep the agent from ending its ranks."""
        return self._waiting


class Agent(LocalElasticAgent):
    """The agent of this machine. code: the exit code for all its ranks."""

    STOPS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

    def __init__(
        self, store: TCPStore, program: Program, argv: Sequence[str], launch: Launch, kept: Kept | None
    ) -> None:
        self.launch, self.kept, self.code = launch, kept, 0
        self._attempt, self._restarts, self._reached = -1, 0, list[int]()
        self._is_asked, self._place = False, (store.host, store.port)
        self._failed: int | None = None  # the local number of the rank that failed first in this round
        machines = Machines.from_backend(
            "ranks",
            store,
            C10dRendezvousBackend(store, "ranks"),
            1,  # so that those who came know who did not
            launch.world_size // launch.starts,
            f"{launch.rank // launch.starts:05}",  # torch numbers machines by their names
            RendezvousTimeout(
                join=timedelta(seconds=launch.timeout + SAVING), last_call=timedelta(seconds=launch.timeout)
            ),
            keep_alive_interval=2,
        )
        words = [*argv, f"--init-timeout={launch.timeout}", *["--elastic"] * launch.elastic]
        spec = WorkerSpec(
            role="",
            local_world_size=launch.starts,
            entrypoint=_rank,
            args=(program, words, signal.getsignal(signal.SIGINT)),
            rdzv_handler=machines,
            max_restarts=sys.maxsize,  # those of this machine are counted here
            monitor_interval=0.1,
        )
        # A forked rank need not import anything, which is half of a short run. macOS cannot be forked, nor CUDA where
        # there is a GPU: torch's wheels for Linux are built with it wherever they run.
        method = "fork" if sys.platform == "linux" and torch.cuda.device_count() == 0 else "spawn"
        super().__init__(spec, DefaultLogsSpecs(os.devnull), method, exit_barrier_timeout=30.0)

    def asked_to_stop(self, number: int, frame: FrameType | None) -> None:
        """A signal to this process: the ranks save and end, and are not started again."""
        self._is_asked = True
        if number != signal.SIGINT:
            self._send(number)

    def _send(self, number: int) -> None:
        for process in self._processes():
            if process.is_alive():
                os.kill(process.pid, number)

    def _processes(self) -> list[Any]:
        context: Any = self._pcontext
        return context._pc.processes if context else []

    def _rendezvous(self, group: Any) -> None:
        """Before each round: who takes part, and where the store is. MissingRanks, without
        --elastic, where not all machines came."""
        if self._is_asked:
            raise SystemExit
        super()._rendezvous(group)
        launch, store, count = self.launch, group.store, group.group_world_size
        store.set(f"machine/{group.group_rank}", json.dumps([launch.rank, launch.host, self._attempt]))
        machines = [json.loads(store.get(f"machine/{number}")) for number in range(count)]
        hosts = {first + number: host for first, host, _ in machines for number in range(launch.starts)}
        if len(hosts) < launch.world_size and not launch.elastic:
            raise MissingRanks(missing(hosts, launch.world_size, launch))
        group.master_addr, group.master_port = self._place
        self._attempt = 1 + max(attempt for _, _, attempt in machines)
        self._remaining_restarts = sys.maxsize - self._attempt  # from which the ranks learn it
        self._began, self._failed = time.time(), None
        self._incidents = self.kept and Incidents(
            self.kept.folder, f"launcher_{launch.host}", attempt=self._attempt, host=launch.host
        )

    def _look(self, group: WorkerGroup) -> RunResult:
        """How the ranks are; if one has failed, once all have ended."""
        processes = self._processes()
        failed = next((process for process in processes if process.exitcode), None)
        if failed is not None and self._failed is None:
            self._failed = processes.index(failed)
            for number in (signal.SIGTERM, signal.SIGKILL) if failed.exitcode != REFUSED else ():
                end = time.monotonic() + GRACE
                for process in processes:
                    process.join(max(0.0, end - time.monotonic()))
                self._send(number)
        return super()._monitor_workers(group)

    def _monitor_workers(self, group: WorkerGroup) -> RunResult:
        """If the ranks have failed, decide whether they are started again."""
        result = self._look(group)
        if result.is_failed() and self._failed is not None:
            ended = zip(group.workers, self._processes(), strict=True)
            codes = {worker.global_rank: process.exitcode for worker, process in ended}
            self._remaining_restarts = int(self._goes_on(group.workers[self._failed].global_rank, codes))
        return result

    def _stop_workers(self, group: WorkerGroup) -> None:
        """Before another round: ranks that run finish their step and save."""
        if group.state == WorkerState.HEALTHY:
            say("a machine has come, or starts its ranks again: all ranks meet anew", "restart")
            end = time.monotonic() + SAVING
            self._send(MEET_AGAIN)
            while self._look(group).state == WorkerState.HEALTHY and time.monotonic() < end:
                time.sleep(self._worker_group.spec.monitor_interval)
        super()._stop_workers(group)

    def _goes_on(self, first: int, codes: dict[int, int]) -> bool:
        """Note how the ranks have ended, and say so. first: the rank that failed first."""
        code, limit, kept = codes[first], self.launch.max_restarts, self.kept
        self.code = code if code >= 0 else 128 - code
        if self.code in FINAL:
            return False
        for rank, ended in codes.items():
            how = {"exit_code": ended} if ended >= 0 else {"signal": signal_name(-ended)}
            self._note("rank ended", how_it_ended(rank, ended), rank=rank, first=rank == first, **how)
        why = how_it_ended(first, code)
        if self._is_asked or self._restarts == limit:
            if limit and not self._is_asked:
                say(f"{why}; no restart is left (--max-restarts {limit})")
            elif code < 0:  # otherwise the rank itself has said why
                say(why)
            return False
        where = ""
        if kept and self._incidents:
            self._incidents.iteration = kept.reached(self._began)
            self._reached.append(self._incidents.iteration)
            if self._reached[-LOOP:] == [self._reached[-1]] * LOOP:
                line = (
                    f"crash loop: {why}; the ranks have failed at iteration {self._reached[-1]} {LOOP} times in a row; "
                    f"{how_to_call('post_mortem')} {kept.folder} says what failed first"
                )
                self._note("crash loop", line)
                say(line)
                self.code = 1
                return False
            newest = kept.newest()
            where = f", from iteration {newest}" if newest else ", from the beginning"
        self._restarts += 1
        line = f"{why}: restart {self._restarts} of {limit}{where}"
        self._note("restart", line)
        say(line, "restart")
        self.code = 0
        return True

    def _note(self, kind: str, text: str, **details: Any) -> None:
        if self._incidents:
            self._incidents.note(kind, text, **details)


def _rank(program: Program, argv: Sequence[str], interrupt: Any) -> None:
    for number in Agent.STOPS:
        signal.signal(number, interrupt if number == signal.SIGINT else signal.SIG_DFL)
    logging.disable(logging.NOTSET)
    if os.environ["RANK"] == "0":  # somebody may type; multiprocessing puts the null device in place of every rank's
        sys.stdin = os.fdopen(0, closefd=False)
    try:
        code = program(argv)
    except KeyboardInterrupt:
        code = INTERRUPTED
    except Exception:  # a bug of ours
        traceback.print_exc()
        code = 1
    sys.exit(code)


def say(line: str, kind: str = "error") -> None:
    """A line of this launcher on standard error."""
    print(f"{kind}: {line}", file=sys.stderr, flush=True)


def how_it_ended(rank: int, code: int) -> str:
    """A rank's end in words. code: -N where signal N ended it."""
    return f"rank {rank} was ended by {signal_name(-code)}" if code < 0 else f"rank {rank} ended with exit code {code}"


def signal_name(number: int) -> str:
    """SIGKILL, for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
