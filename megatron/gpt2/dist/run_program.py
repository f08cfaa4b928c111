"""Programs of several ranks: --nproc-per-node starts them, `run_program` takes each from its command line to its exit
code.

torch's elastic agent starts the ranks of this machine, and again if one fails (--max-restarts). The same words are run
again, and so a run goes on from its newest checkpoint. Over several machines the agents meet before each round in a
store that the first of them serves. A machine that comes, or that starts its ranks again, ends the round of the others
after their step and a save. With --elastic a round begins with the machines that are there.

`LocalElasticAgent` brings the rounds. Added to it are what a user reads and what post_mortem reads, exit codes, time
for the other ranks to name a lost one and to save, and the end of a crash loop.
"""

import functools
import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousInfo
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

import mpu
from data_utils.command_line import how_to_call, line_buffered
from megatron.gpt2.config import require
from megatron.gpt2.dist.launch import Launch, read_launch
from megatron.gpt2.dist.ranks import LeftRanks, MissingRanks, Ranks
from megatron.gpt2.dist.rendezvous import leave, meet, missing, name_lost, open_store
from megatron.gpt2.monitor.incidents import Incidents, read_incidents, read_records
from megatron.gpt2.monitor.run_report import METRICS

Log = Callable[[str], None]
Program = Callable[[Sequence[str], Ranks, Log], int | None]
RankProgram = Callable[[Sequence[str]], int]

REFUSED = 2
INTERRUPTED = 128 + signal.SIGINT
FINAL = (REFUSED, INTERRUPTED)  # exit codes after which ranks are not started again
LOOP = 3  # so often at the same iteration: what fails there fails every time
GRACE = 6.0  # seconds that the others have once one rank has ended: to name it, or to save
SAVING = 600  # seconds that ranks have to finish their step and save, when a machine has come
MEET_AGAIN = signal.SIGUSR2  # asks them to
STOPS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)  # of which the launcher passes all but Ctrl-C on
# Another launcher kills all ranks when it sees the first one end. So the rank that prints an error stays for a while,
# until the others have met the same error by themselves. The others stay until they are told to go, or longer.
LAUNCHER_GRACE = 2.0  # seconds
SILENT_GRACE = 10.0


def run_program(program: Program, argv: Sequence[str] | None) -> int:
    """Run `program(argv, ranks, log)` on each rank that the command line or a launcher starts. Returns the exit code.

    program: at the top level of a module. It returns its own exit code, None for 0; its `log` writes a line to rank 0's
    standard error. argv: None takes this process's command line.
    Exit codes: the program's; 1 if another rank was lost; 2 for bad input, which one rank reports in one line; 130
    after Ctrl-C.
    """
    try:
        return _run(program, sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:  # also one that comes while the ranks part
        return INTERRUPTED


def _run(program: Program, argv: Sequence[str]) -> int:
    line_buffered()
    ranks = Ranks()
    try:
        launch, words = read_launch(argv)
        require(not launch.elastic, "--elastic is for training: this program needs all of its ranks")
        if launch.starts:
            return start_ranks(functools.partial(run_program, program), words, launch)
        ranks = launch.ranks()
        if launch.notice:
            print(launch.notice, file=sys.stderr)
        ranks = meet(launch)
        return program(words, ranks, lambda line: print(line, file=sys.stderr) if ranks.rank == 0 else None) or 0
    except (ValueError, OSError, RuntimeError) as error:
        return ended_by(error, ranks)
    finally:
        mpu.destroy_model_parallel()
        leave(ranks)


def ended_by(error: Exception, ranks: Ranks) -> int:
    """Print the line that says why `error` ends this rank, and return its exit code: 2 for bad input and for a meeting
    that failed, 1 if another rank was lost. Raises `error` if it is a bug of ours."""
    bad_input = isinstance(error, (ValueError, OSError))
    if isinstance(error, LeftRanks):
        ranks.note("lost", str(error))
        refuse(error, ranks)
        return 1
    if not bad_input and name_lost(ranks):
        return 1
    if bad_input or isinstance(error, dist.DistError):
        if ranks.incidents is not None:
            ranks.incidents.refused(error)
        return refuse(error, ranks)
    raise error


def refuse(error: Exception, ranks: Ranks) -> int:
    """Print `error` as one line, on the first rank of each machine, and leave the meeting. Returns the exit code, 2."""
    prints = ranks.local_rank == 0
    if prints:
        where = f" ({os.uname().nodename})" if ranks.rank else ""
        print(f"error{where}: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
    if ranks.world_size > 1:
        told = threading.Event()
        signal.signal(signal.SIGTERM, signal.SIG_IGN if prints else lambda number, frame: told.set())
        told.wait(LAUNCHER_GRACE if prints else SILENT_GRACE)
    ranks.end(REFUSED)
    ranks.leave()
    return REFUSED


def refuse_memory(line: str, ranks: Ranks) -> int:
    """Print `line`, which says that this rank is out of memory, unless another rank has printed such a line.

    Other ranks may not run out, or cannot print. Returns the exit code, 2. The caller leaves the process group and the
    meeting.
    """
    if ranks.meeting is None or ranks.meeting.store.add("out of memory", 1) == 1:
        print(f"error: {line}", file=sys.stderr, flush=True)
    return REFUSED


@dataclass(frozen=True)
class Kept:
    """What a run keeps on the disk. folder: of --save. newest: returns the iteration of the newest checkpoint there, 0
    if there is none."""

    folder: Path
    newest: Callable[[], int]


def start_ranks(program: RankProgram, argv: Sequence[str], launch: Launch, kept: Kept | None = None) -> int:
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
        before = {number: signal.signal(number, agent.asked_to_stop) for number in STOPS}
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

    def __init__(
        self, store: TCPStore, program: RankProgram, argv: Sequence[str], launch: Launch, kept: Kept | None
    ) -> None:
        self.launch, self.kept, self.code = launch, kept, 0
        self._attempt, self._restarts, self._reached = -1, 0, list[int]()
        self._is_asked, self._place = False, (store.host, store.port)
        self._failed: int | None = None  # the local number of the rank that failed first in this round
        machines = Machines.from_backend(
            "ranks",
            store,
            C10dRendezvousBackend(store, "ranks"),
            1,  # so that those who came learn who did not
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
        # A forked rank need not import anything, which is half of a short run. macOS cannot be forked, nor CUDA if
        # there is a GPU: torch's wheels for Linux are built with it wherever they run.
        method = "fork" if sys.platform == "linux" and torch.cuda.device_count() == 0 else "spawn"
        super().__init__(spec, DefaultLogsSpecs(os.devnull), method, exit_barrier_timeout=30.0)

    def asked_to_stop(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal to this process: the ranks save and end, and are not started again."""
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
        """Before each round: find out who takes part, and where the store is. MissingRanks, without --elastic, if not
        all machines came."""
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
            how = {"exit_code": ended} if ended >= 0 else {"signal": signal.Signals(-ended).name}
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
            newest = kept.newest()
            said = [one["iteration"] for one in read_incidents(kept.folder) if one["time"] >= self._began]
            logged = [record["iteration"] for record in read_records(kept.folder / METRICS)[-1:]]
            self._incidents.iteration = reached = max([newest, *said, *logged])
            self._reached.append(reached)
            if self._reached[-LOOP:] == [reached] * LOOP:
                line = (
                    f"crash loop: {why}; the ranks have failed at iteration {reached} {LOOP} times in a row; "
                    f"{how_to_call('post_mortem')} {kept.folder} says what failed first"
                )
                self._note("crash loop", line)
                say(line)
                self.code = 1
                return False
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


def _rank(program: RankProgram, argv: Sequence[str], interrupt: Any) -> None:
    for number in STOPS:
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
    """Print a line of this launcher on standard error."""
    print(f"{kind}: {line}", file=sys.stderr, flush=True)


def how_it_ended(rank: int, code: int) -> str:
    """A rank's end in words. code: -N if signal N ended it."""
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return f"rank {rank} {how}"
