"""Start programs with several ranks (--nproc-per-node), and run each rank from its command line to its exit code.

torch's elastic agent starts the ranks of a machine. If a rank fails, the agent restarts all ranks (--max-restarts) with
the same command line, so that the run continues from its newest checkpoint. The time between two restarts is a round.
With several machines, the agents join a rendezvous before each round, in a store on the first machine. If a machine
joins or restarts its ranks, the other ranks finish their step, save and restart, too. With --elastic, a round starts
with the machines that have joined.

`NodeAgent` adds to `LocalElasticAgent` messages for users and for post_mortem, exit codes, time for the other ranks to
name a lost rank and to save, and the detection of crash loops.
"""

import functools
import json
import logging
import multiprocessing
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
import torch.multiprocessing as mp
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousInfo
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

import mpu
from data_utils.command_line import Log, configure_output, error_line, how_to_call, require
from megatron.gpt2.dist.launch import Launch, read_launch
from megatron.gpt2.dist.ranks import (
    HEARTBEAT_INTERVAL,
    LEAVE_TIMEOUT,
    POLL_INTERVAL,
    LostRanksError,
    MissingRanksError,
    RankInfo,
    TimedStore,
    print_status,
)
from megatron.gpt2.dist.rendezvous import (
    describe_missing,
    join_rendezvous,
    open_store,
    prefix_in_agent_store,
    report_lost_ranks,
    shutdown_distributed,
)
from megatron.gpt2.dist.signals import SignalThread, exit_on_sigterm
from megatron.gpt2.monitor.html_report import METRICS
from megatron.gpt2.monitor.incidents import IncidentLog, read_incidents, read_records

Program = Callable[[Sequence[str], RankInfo, Log], int | None]
RankProgram = Callable[[Sequence[str]], int]

BAD_INPUT = 2
INTERRUPTED = 128 + signal.SIGINT
NO_RESTART = (BAD_INPUT, INTERRUPTED)  # After these exit codes, ranks are not restarted.
CRASH_LOOP_FAILURES = 3  # After this number of failures at the same iteration, ranks are not restarted.
EXIT_TIMEOUT = 6.0  # After a rank has failed, the other ranks have this number of seconds to name it and to save.
STOP_TIMEOUT = 2.0  # A launcher that does not run its signal handler ends after this number of seconds.
SAVE_TIMEOUT = 600  # When a machine joins, the ranks have this number of seconds to finish their step and save.
RESTART_SIGNAL = signal.SIGUSR2  # This signal asks the ranks to finish their step and save.
# The launcher forwards these signals to its ranks, except SIGINT (Ctrl-C), which the terminal sends to the ranks.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGINT)
# Other launchers kill all ranks when the first rank exits. A rank that has printed an error therefore exits after
# LAUNCHER_GRACE seconds, so that the other ranks can find the same error. The other ranks exit on SIGTERM or after
# SILENT_GRACE seconds.
LAUNCHER_GRACE = 2.0
SILENT_GRACE = 10.0
FIRST_GRACE = 0.5  # Other ranks print an error if the first rank of the machine has not printed it after this time.


def run_program(program: Program, argv: Sequence[str] | None) -> int:
    """Run `program(argv, rank_info, log)` on each rank that the command line or a launcher starts. Return the exit
    code: that of the program, 1 if another rank was lost, 2 for bad input (one rank prints the error in one line), and
    130 after Ctrl-C.

    program: a top-level function of a module, which returns its exit code (None is 0). The argument `log` of the
        program is a function that prints a line on the standard error of rank 0.
    argv: the command line; None for that of this process.
    """
    try:
        return _run(program, sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:  # Ctrl-C was pressed during the shutdown.
        return INTERRUPTED


def _run(program: Program, argv: Sequence[str]) -> int:
    configure_output(line_buffering=True)
    rank_info = RankInfo()
    try:
        launch, words = read_launch(argv)
        require(not launch.elastic, "--elastic is for training: this program needs all of its ranks")
        if launch.ranks_to_start:
            return start_ranks(functools.partial(run_program, program), words, launch)
        rank_info = launch.rank_info()
        if launch.notice:
            print(launch.notice, file=sys.stderr)
        rank_info = join_rendezvous(launch)
        return (
            program(words, rank_info, lambda line: print(line, file=sys.stderr) if rank_info.rank == 0 else None) or 0
        )
    except (ValueError, OSError, RuntimeError) as error:
        return handle_error(error, rank_info)
    finally:
        mpu.destroy_model_parallel()
        shutdown_distributed(rank_info)


def handle_error(error: Exception, rank_info: RankInfo) -> int:
    """Print why `error` ends this rank, and return the exit code: 2 for bad input or a failed rendezvous, 1 if another
    rank was lost. Raise `error` again if it is a bug in the program."""
    bad_input = isinstance(error, (ValueError, OSError))
    if not bad_input and report_lost_ranks(rank_info):
        return 1
    if not bad_input and not isinstance(error, dist.DistError):
        raise error
    if isinstance(error, LostRanksError):
        rank_info.note("lost", str(error))
    elif rank_info.incidents is not None:
        rank_info.incidents.refused(error)
    return exit_with_error(error, rank_info)


def exit_with_error(error: Exception, rank_info: RankInfo) -> int:
    """Print `error` in one line, on one rank of each machine, and leave the rendezvous. Return the attribute
    `exit_code` of the error, or 2."""
    code = getattr(error, "exit_code", BAD_INPUT)
    prints = getattr(error, "is_first_on_node", False) or _is_first_error(rank_info)
    if prints:
        where = f" ({os.uname().nodename})" if rank_info.rank else ""
        print_status(error_line(error), f"error{where}")
    if rank_info.world_size > 1:
        if prints:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(LAUNCHER_GRACE)
        else:  # The rank that prints leaves last, because it may serve the store.
            exit_on_sigterm(code)
            rank_info.leave()
            time.sleep(SILENT_GRACE)
    rank_info.end(code)
    rank_info.leave()
    return code


def _is_first_error(rank_info: RankInfo) -> bool:
    """Return True on only one of the ranks of a machine that end with an error, if possible on the first rank."""
    rendezvous = rank_info.rendezvous
    if rendezvous is None or rendezvous.heartbeat.is_stopped:
        return rank_info.local_rank == 0
    store, key = TimedStore(rendezvous.store, LEAVE_TIMEOUT), f"error/{rendezvous.hosts[rank_info.rank]}"
    try:
        end = time.monotonic() + FIRST_GRACE * (rank_info.local_rank > 0)
        while time.monotonic() < end and not store.check([key]):
            time.sleep(POLL_INTERVAL)
        return bool(store.add(key, 1) == 1)
    except (dist.DistError, MissingRanksError):  # The server of the store has ended.
        return rank_info.local_rank == 0


@dataclass(frozen=True)
class SaveFolder:
    """The --save folder of a run.

    newest_iteration: a function that returns the iteration of the newest checkpoint, or 0.
    """

    path: Path
    newest_iteration: Callable[[], int]


def start_ranks(
    program: RankProgram, argv: Sequence[str], launch: Launch, save_folder: SaveFolder | None = None
) -> int:
    """Run `program(argv)` on `launch.ranks_to_start` ranks of this machine. Return the exit code of the first rank that
    fails, or 0.

    If a rank fails, the others end within EXIT_TIMEOUT seconds, and all ranks are restarted at most
    `launch.max_restarts` times. SIGTERM, SIGHUP and SIGUSR1 are forwarded to the ranks.

    program: a top-level function of a module, which the ranks import. The ranks get torchrun's variables and flags for
        `read_launch`.
    launch: the launch of the first of these ranks.
    save_folder: the --save folder of a training program, otherwise None.
    """
    logging.disable(logging.CRITICAL)  # Suppress torch's tracebacks about a killed rank.
    # All rounds use one store. torch's own store may move to a different machine in each round.
    os.environ |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "TORCHELASTIC_SIGNALS_TO_HANDLE": ""}
    with_address = replace(launch, init_method=launch.init_method or "tcp://127.0.0.1:0")
    with open_store(with_address, is_server=launch.rank == 0) as (store, _server):
        agent = NodeAgent(store, program, argv, launch, save_folder)
        others = set(multiprocessing.active_children())
        signals = SignalThread(STOP_SIGNALS, agent.end_wait, agent.request_stop)
        try:
            agent.run()
        except RendezvousError:
            print_status("the machine of rank 0, which serves the rendezvous, does not answer")
            agent.code = 1
        except SystemExit:  # A signal stopped the launcher between two rounds.
            pass
        finally:
            agent.rendezvous._stop_heartbeats()  # Otherwise torch may log that the store no longer exists.
            logging.disable(logging.NOTSET)
            # After an error in torch, some ranks may still run.
            for process in set(multiprocessing.active_children()) - others:
                process.terminate()
                process.join(EXIT_TIMEOUT)
                process.kill()
            signals.close()
    return agent.code


class NodeRendezvous(DynamicRendezvousHandler):
    """torch's rendezvous for agents. Each machine (node) has one agent."""

    use_agent_store = True  # torch tells the ranks to use the agents' store for their rendezvous.

    _waiting = 0

    def next_rendezvous(self) -> RendezvousInfo:
        """Start a round of the rendezvous."""
        self._waiting = 0
        return super().next_rendezvous()

    def _keep_alive(self) -> None:
        super()._keep_alive()
        self._waiting = len(self._state_holder.state.wait_list)

    def num_nodes_waiting(self) -> int:
        """Return the number of waiting machines at the last heartbeat. torch's method blocks if the store is
        unreachable."""
        return self._waiting


class NodeAgent(LocalElasticAgent):
    """Starts, watches and restarts the ranks of this machine.

    code: the exit code of the launcher.
    """

    def __init__(
        self, store: TCPStore, program: RankProgram, argv: Sequence[str], launch: Launch, save_folder: SaveFolder | None
    ) -> None:
        self.launch, self.save_folder, self.code = launch, save_folder, 0
        self._attempt, self._restarts, self._failed_iterations = -1, 0, list[int]()
        self._stop_signal, self._tcp_store = 0, TimedStore(store, launch.timeout)
        self._store_address = store.host, store.port
        self._failed: int | None = None  # The local rank that failed first in this round.
        self.rendezvous: Any = NodeRendezvous.from_backend(
            "ranks",
            store,
            C10dRendezvousBackend(self._tcp_store, "ranks"),  # type: ignore[arg-type]
            1,  # A round starts with any number of machines. `_rendezvous` names the missing machines.
            launch.world_size // launch.ranks_to_start,
            f"{launch.rank // launch.ranks_to_start:05}",  # torch orders machines by name.
            RendezvousTimeout(
                join=timedelta(seconds=launch.timeout + SAVE_TIMEOUT), last_call=timedelta(seconds=launch.timeout)
            ),
            keep_alive_interval=2,
        )
        words = [*argv, f"--init-timeout={launch.timeout}", *["--elastic"] * launch.elastic]
        spec = WorkerSpec(
            role="",
            local_world_size=launch.ranks_to_start,
            entrypoint=_run_rank,
            args=(program, words, signal.getsignal(signal.SIGINT)),
            rdzv_handler=self.rendezvous,
            max_restarts=sys.maxsize,  # `_should_restart` counts the restarts.
            monitor_interval=0.1,
        )
        # A forked rank imports nothing, which saves half of the time of a short run. Forking does not work on macOS and
        # with CUDA.
        method = "fork" if sys.platform == "linux" and torch.cuda.device_count() == 0 else "spawn"
        super().__init__(spec, DefaultLogsSpecs(os.devnull), method, exit_barrier_timeout=30.0)

    def request_stop(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal to the launcher: the ranks save and end, and they are not restarted."""
        self._stop_signal = number
        if not any(process.is_alive() for process in self._processes()):
            raise SystemExit  # SystemExit also ends a launcher that waits for other machines.
        if number != signal.SIGINT:
            self._send(number)

    def end_wait(self, number: signal.Signals) -> None:
        """End the launcher if its main thread, which runs `request_stop`, waits for a store that does not answer."""
        time.sleep(STOP_TIMEOUT)
        if not self._stop_signal:
            os._exit(128 + number)

    def _send(self, number: int) -> None:
        for process in self._processes():
            if process.is_alive():
                os.kill(process.pid, number)

    def _processes(self) -> list[Any]:
        context: Any = self._pcontext
        return context._pc.processes if context else []

    def _rendezvous(self, group: Any) -> None:
        """Learn which machines take part in the round, and set the store's address for the ranks. Without --elastic,
        raise MissingRanksError if a machine is missing."""
        launch, machines = self.launch, None
        while machines is None:
            if self._stop_signal:
                raise SystemExit
            try:
                super()._rendezvous(group)
                group.store.set(f"machine/{group.group_rank}", json.dumps([launch.rank, launch.host, self._attempt]))
                count = group.group_world_size
                machines = [json.loads(group.store.get(f"machine/{index}")) for index in range(count)]
            except dist.DistStoreError:
                print_status("a machine was lost before it started its ranks: all machines join again", "restart")
            except dist.DistNetworkError as error:
                raise RendezvousError from error
        hosts = {first + local: host for first, host, _ in machines for local in range(launch.ranks_to_start)}
        if len(hosts) < launch.world_size and not launch.elastic:
            raise MissingRanksError(describe_missing(hosts, launch.world_size, launch))
        group.master_addr, group.master_port = self._store_address
        self._attempt = 1 + max(attempt for _, _, attempt in machines)
        # torch computes TORCHELASTIC_RESTART_COUNT, a variable of the ranks, from this attribute.
        self._remaining_restarts = sys.maxsize - self._attempt
        self._round_start, self._failed = time.time(), None
        self._incidents = self.save_folder and IncidentLog(
            self.save_folder.path, f"launcher_{launch.host}", attempt=self._attempt, host=launch.host
        )

    def _poll_ranks(self, group: WorkerGroup) -> RunResult:
        """Return torch's result for the ranks: running, failed or finished. If a rank has failed, first end the other
        ranks."""
        processes = self._processes()
        failed = next((process for process in processes if process.exitcode), None)
        if failed is not None and self._failed is None:
            self._failed = processes.index(failed)
            if failed.exitcode != BAD_INPUT:
                self._end_ranks()
        return super()._monitor_workers(group)

    def _end_ranks(self) -> None:
        """Wait until all ranks have ended. After EXIT_TIMEOUT seconds send SIGTERM, and later SIGKILL."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            end = time.monotonic() + EXIT_TIMEOUT
            for process in self._processes():
                process.join(max(0.0, end - time.monotonic()))
            self._send(number)

    def _monitor_workers(self, group: WorkerGroup) -> RunResult:
        """Return torch's result for the ranks. If a rank has failed, decide whether to restart all ranks."""
        result = self._poll_ranks(group)
        if result.is_failed() and self._failed is not None:
            ended = zip(group.workers, self._processes(), strict=True)
            codes = {worker.global_rank: process.exitcode for worker, process in ended}
            self._remaining_restarts = int(self._should_restart(group.workers[self._failed].global_rank, codes))
        return result

    def _stop_workers(self, group: WorkerGroup) -> None:
        """Let the ranks finish their step and save, and then stop them before a new round."""
        if group.state == WorkerState.HEALTHY:
            print_status("a machine has joined or restarted its ranks: all ranks restart", "restart")
            end = time.monotonic() + SAVE_TIMEOUT
            self._send(RESTART_SIGNAL)
            while (
                self._poll_ranks(group).state == WorkerState.HEALTHY
                and time.monotonic() < end
                and not self._has_reported_failure()  # After a failure, the ranks cannot save.
            ):
                time.sleep(self._worker_group.spec.monitor_interval)
            self._end_ranks()
        super()._stop_workers(group)

    def _has_reported_failure(self) -> bool:
        """Return whether a rank of any machine has reported a lost rank or a hang in this round."""
        prefix = prefix_in_agent_store(self._attempt)
        try:
            return any(self._tcp_store.check([f"{prefix}/{key}"]) for key in ("lost", "hang"))
        except (dist.DistError, MissingRanksError):  # The store no longer exists.
            return True

    def _should_restart(self, first: int, codes: dict[int, int]) -> bool:
        """Record and print how the ranks ended. Return whether the ranks are restarted.

        first: the rank that failed first.
        codes: {rank: exit code, or -N if signal N ended the rank}.
        """
        code, limit, save_folder = codes[first], self.launch.max_restarts, self.save_folder
        self.code = code if code >= 0 else 128 - code
        if self._stop_signal and code == BAD_INPUT:
            self.code = 128 + self._stop_signal  # The ranks have run `exit_on_sigterm`.
        if self.code in NO_RESTART:
            return False
        for rank, ended in codes.items():
            details = {"exit_code": ended} if ended >= 0 else {"signal": signal.Signals(-ended).name}
            self._note("rank ended", describe_exit(rank, ended), rank=rank, first=rank == first, **details)
        why = describe_exit(first, code)
        if self._stop_signal or self._restarts == limit:
            if limit and not self._stop_signal:
                print_status(f"{why}; no restart is left (--max-restarts {limit})")
            elif code < 0:  # A rank that a signal has killed cannot print the reason.
                print_status(why)
            return False
        where = ""
        if save_folder and self._incidents:
            newest = save_folder.newest_iteration()
            incidents = read_incidents(save_folder.path)
            noted = [incident["iteration"] for incident in incidents if incident["time"] >= self._round_start]
            logged = [record["iteration"] for record in read_records(save_folder.path / METRICS)[-1:]]
            self._incidents.iteration = reached = max([newest, *noted, *logged])
            self._failed_iterations.append(reached)
            if self._failed_iterations[-CRASH_LOOP_FAILURES:] == [reached] * CRASH_LOOP_FAILURES:
                line = (
                    f"crash loop: {why}; the ranks have failed at iteration {reached} {CRASH_LOOP_FAILURES} times in a "
                    f"row; {how_to_call('post_mortem')} {save_folder.path} prints what failed first"
                )
                self._note("crash loop", line)
                print_status(line)
                self.code = 1
                return False
            where = f", from iteration {newest}" if newest else ", from the beginning"
        self._restarts += 1
        line = f"{why}: restart {self._restarts} of {limit}{where}"
        self._note("restart", line)
        print_status(line, "restart")
        self.code = 0
        return True

    def _note(self, kind: str, text: str, **details: Any) -> None:
        if self._incidents:
            self._incidents.note(kind, text, **details)


def _end_after_launcher(program_ended: threading.Event) -> None:
    """Wait until the launcher has ended. Then ask this rank to save, and end the process when the program has ended, or
    after SAVE_TIMEOUT seconds."""
    launcher = multiprocessing.parent_process()
    assert launcher is not None
    while os.getppid() == launcher.pid:
        time.sleep(HEARTBEAT_INTERVAL)
    os.kill(os.getpid(), signal.SIGTERM)
    program_ended.wait(SAVE_TIMEOUT)
    os._exit(1)  # torch would wait until the launcher reads the result.


def _run_rank(program: RankProgram, argv: Sequence[str], interrupt: Any) -> None:
    signal.set_wakeup_fd(-1)  # A forked rank must not write signals to the launcher's socket.
    mp._prctl_pr_set_pdeathsig(0)  # type: ignore[attr-defined]  # torch's SIGINT would be reported as Ctrl-C.
    program_ended = threading.Event()
    threading.Thread(target=_end_after_launcher, args=(program_ended,), name="launcher", daemon=True).start()
    for number in STOP_SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, interrupt if number == signal.SIGINT else signal.SIG_DFL)
    logging.disable(logging.NOTSET)
    if os.environ["RANK"] == "0":  # multiprocessing has replaced standard input, from which rank 0 may read prompts.
        sys.stdin = os.fdopen(0, closefd=False)
    try:
        code = program(argv)
    except KeyboardInterrupt:
        code = INTERRUPTED
    except Exception:  # Any other exception is a bug in the program.
        traceback.print_exc()
        code = 1
    program_ended.set()
    sys.exit(code)


def describe_exit(rank: int, code: int) -> str:
    """Describe how a rank ended.

    code: the exit code, or -N if signal N ended the rank.
    """
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return f"rank {rank} {how}"
