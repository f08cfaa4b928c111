"""Failure analysis: finds the first cause of a run's end in the incidents that its processes recorded.

When a rank dies, many processes record incidents (`monitor/incidents.py`). A killed rank records nothing, and its
launcher records the signal. All other ranks lose the connection, fail in a collective and end. failure_analysis.py
finds the first incident that no other incident caused.
"""

import re
import signal
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from megatron.gpt2.dist.ranks import format_ranks
from megatron.gpt2.monitor.incidents import INCIDENT_DEFAULTS

Incident = Mapping[str, Any]

START_WINDOW = 600.0  # seconds within which all ranks of an attempt start
KILL_WINDOW = 2.0  # seconds within which a scheduler ends all ranks
# A stack with a line that matches LOADING_LINE was recorded in the data loader.
LOADING_LINE = re.compile(r"data_utils/|train/data\.py|dataloader|DataLoader")
NOT_A_CRASH = {"", "SIGTERM", "SIGHUP", "SIGINT", "SIGUSR1"}  # no signal, or a signal that asks a run to stop
KILLER = "a user, the scheduler, or the system because of too little memory (see the machine's log) ended"

# {kind of failure: (its meaning, what to do before the run continues)}. The incident of an error has the kind of
# failure as its `cause`.
KINDS = {
    "out of memory": (
        "this layout needs more memory than was available",
        "give --checkpoint-activations, a smaller --micro-batch-size or more model parallelism: tools/plan.py lists "
        "layouts that fit",
    ),
    "not finite": (
        "many steps had NaN or Inf: the training diverged, or a device is faulty",
        "check the loss before that in metrics.jsonl; continue from an earlier checkpoint, perhaps with a lower --lr",
    ),
    "replica drift": (
        "a rank computed or stored wrong numbers: faulty memory or a faulty device",
        "leave that machine out, and continue from an earlier checkpoint",
    ),
    "full disk": (
        "the disk was full or too slow",
        "free space or give a different --save; the last committed checkpoint is complete",
    ),
    "failed save": (
        "the last checkpoint was not written",
        "fix the reason in the line above; the same command continues from the last committed checkpoint",
    ),
    "damaged checkpoint": (
        "a file has changed since it was written",
        "nothing, if an older checkpoint is valid: the run loads it; otherwise give a different --load",
    ),
    "missing ranks": (
        "they were not started, or cannot connect to the other ranks",
        "start them, or check the network between the machines",
    ),
    "damaged data": (
        "a token file has changed since it was written",
        "write it again: tools/inspect_data.py --verify shows where it is damaged",
    ),
    "bad input": ("the command line or a file is invalid", "fix it as the line that begins with error: describes"),
    "an error of the program": (
        "the log of that rank has the traceback",
        "report it with the traceback: the same command may fail again at the same step",
    ),
    "crashed rank": (
        "its process crashed in a library or a driver, or its memory is faulty",
        "read the log of that rank; if it is always the same machine, leave it out",
    ),
    "killed rank": (f"{KILLER} it", "nothing, unless memory was short: then reduce the memory per rank"),
    "killed job": (
        "a scheduler or a user ended the job",
        "nothing; with Slurm, --signal=TERM@120 lets it save first",
    ),
    "killed node": (
        f"{KILLER} all ranks of the machine; its launcher still runs",
        "leave that machine out if it happens again",
    ),
    "lost node": (
        "all ranks of the machine and its launcher are gone: the machine or its network failed",
        "leave that machine out, or wait for it; the run continues on any number of ranks that divides its batch",
    ),
    "lost link": (
        "all of them continued to run: the network between their machines failed",
        "check the network; tools/bench_collectives.py measures it",
    ),
    "silent rank": (
        "its process was stopped or killed, or its machine does not run it any more",
        "check that machine",
    ),
    "hang": (
        "a rank is stopped, waits for something else, or took a different branch than the others",
        "check that rank's machine; if the stack shows a line of this program, report it with the stacks",
    ),
    "hang in data loading": (
        "a rank waits for its data: a file system does not answer",
        "check the file system of the data on that machine",
    ),
    "Ctrl-C": ("a user pressed it twice, or before the first step", "nothing"),
    "SIGTERM": ("a scheduler or a user ended the ranks before they could save", "nothing"),
    "silent end": (
        "all processes ended at once: the machine lost power or was reset, or the whole job was killed",
        "read the logs of the scheduler and of the machine",
    ),
    "exit code": ("it failed, and its reason is only in its log", "look at the last lines of its log"),
    "ended well": ("the run ended as asked", "nothing"),
}


class Failure(NamedTuple):
    """kind: one of KINDS.
    cause: the first cause, with rank, host and iteration.
    """

    kind: str
    cause: str

    @property
    def is_success(self) -> bool:
        """True if the run ended as requested."""
        return self.kind == "ended well"


def last_attempt(incidents: Sequence[Incident]) -> list[Incident]:
    """Return the incidents of the last start of the ranks, by a user or by --max-restarts.

    If the last incident is a start by a user that was refused, return only the refused starts."""
    if incidents and incidents[-1]["kind"] == "refused" and not incidents[-1]["attempt"]:
        refused = {incident["who"]: incident for incident in incidents if incident["kind"] == "refused"}
        return [incident for incident in refused.values() if incident["time"] > incidents[-1]["time"] - START_WINDOW]
    starts = {incident["who"]: incident for incident in incidents if incident["kind"] == "start"}
    if not starts:
        return list(incidents)
    latest = max(starts.values(), key=lambda incident: incident["time"])
    start_time = min(
        incident["time"]
        for incident in starts.values()
        if incident["attempt"] == latest["attempt"] and incident["time"] > latest["time"] - START_WINDOW
    )
    return [incident for incident in incidents if incident["time"] >= start_time]


def first_cause(incidents: Sequence[Incident], ended: dict[str, Any]) -> Failure:
    """Return the first cause in the last attempt.

    ended: the content of ended.json; empty without this file.
    """
    found = last_attempt(incidents)
    if ended.get("exit_code") == 0:
        reason = ended["reason"] or "it is finished"
        return Failure("ended well", f"nothing: {reason}, at iteration {ended['iteration']:,}")
    causes = (failure for incident in found if (failure := _root_cause(incident, found)))
    failure = next(causes, None) or _lost_failure(found) or _exit_code_failure(found, ended)
    if failure is None:
        last = f"no process recorded how it ended; the last message is from {origin(found[-1])}" if found else ""
        return Failure("silent end", last or "no process recorded anything")
    loops = [incident["text"] for incident in found if incident["kind"] == "crash loop"]
    return Failure(failure.kind, "; ".join([failure.cause, *loops[-1:]]))


def earlier_causes(incidents: Sequence[Incident]) -> list[str]:
    """Return why the ranks failed before they were restarted for their last attempt, in the order of time."""
    last = last_attempt(incidents)
    start = min((incident["time"] for incident in last), default=0.0)
    causes = []
    for attempt in range(max((incident["attempt"] for incident in last), default=0)):
        found = last_attempt([each for each in incidents if each["attempt"] == attempt and each["time"] < start])
        # An incident "end" shows that the ranks did not fail, but stopped because new ranks joined.
        if found and not any(incident["kind"] == "end" for incident in found):
            causes.append(first_cause(found, {}).cause)
    return causes


def _root_cause(incident: Incident, found: Sequence[Incident]) -> Failure | None:
    """Return the failure if `incident` is a first cause, or None if another incident caused it."""
    kind, cause = incident["kind"], incident["cause"]
    if kind == "error" and cause != "another rank" or kind == "refused" and incident is found[0]:
        kind = cause if cause in KINDS else "bad input" if incident["exit_code"] == 2 else "an error of the program"
        at = f", at {incident['at']}" if incident["at"] else ""
        return Failure(kind, f"{origin(incident)}: {incident['text']}{at}")
    if kind == "hang":
        return _hang_failure(found)
    if kind == "rank ended" and incident["first"] and incident["signal"] not in NOT_A_CRASH:
        return _signal_failure(incident, found)
    return None


def _signal_failure(incident: Incident, incidents: Sequence[Incident]) -> Failure:
    """Return the failure if a launcher reports that a signal ended a rank."""
    name, at = incident["signal"], at_iteration(incidents)
    text = f"{ended_rank(incident)} was ended by {name}{at}"
    if name != "SIGKILL":
        return Failure("crashed rank", text)
    killed = [other for other in incidents if other["kind"] == "rank ended" and other["signal"] == name]
    # A machine is lost if all of its ranks were lost. The ranks that a launcher kills after the first failure do not
    # count: no other rank reports them as lost.
    ranks_of_host = {reporting_rank(other) for other in incidents if other["host"] == incident["host"]} - {-1}
    accused = {rank for other in incidents if reporting_rank(other) not in ranks_of_host for rank in lost_ranks(other)}
    if len(ranks_of_host) > 1 and ranks_of_host <= {other["rank"] for other in killed} & accused:
        return Failure(
            "killed node",
            f"{format_ranks(ranks_of_host, {})}, all of {incident['host']}, were ended by {name} at once{at}",
        )
    at_once = {
        other["rank"] for other in killed if other["first"] and abs(other["time"] - incident["time"]) < KILL_WINDOW
    }
    if len(at_once) > 1:
        job_text = f"{len(at_once)} ranks were ended by {name} at once{at}, {ended_rank(incident)} first"
        return Failure("killed job", job_text)
    return Failure("killed rank", text)


def _hang_failure(incidents: Sequence[Incident]) -> Failure:
    """Return the failure if ranks waited too long. Each rank records its own stack. One rank of each machine also
    records the missing `ranks` of a hang."""
    hangs = [incident for incident in incidents if incident["kind"] == "hang"]
    if cut := next((incident["cut"] for incident in hangs if incident["cut"]), None):
        return Failure("lost link", f"{' and '.join(cut)} could not connect to each other{at_iteration(incidents)}")
    missing: list[int] = next((incident["ranks"] for incident in hangs if incident["ranks"]), [])
    stack: list[str] = next((i["stack"] for i in hangs if reporting_rank(i) in missing and i["stack"]), [])
    own_lines = [line.partition(" ")[0] for line in stack if re.match("(megatron|mpu|data_utils)/", line)]
    ranks, at = format_ranks(missing, {}) if missing else "a rank", f", at {own_lines[-1]}" if own_lines else ""
    kind = "hang in data loading" if any(LOADING_LINE.search(line) for line in stack) else "hang"
    return Failure(kind, f"{ranks} did not reach a collective that the others had entered{at}{at_iteration(incidents)}")


def _lost_failure(incidents: Sequence[Incident]) -> Failure | None:
    """Return the failure if ranks stopped responding and no launcher reported how they ended."""
    witnesses = [incident for incident in incidents if incident["kind"] == "lost"]
    if not witnesses:
        return None
    accused = {rank for incident in witnesses for rank in lost_ranks(incident)}
    accusers = {reporting_rank(incident) for incident in witnesses} - {-1}
    at, seen_by = at_iteration(incidents), f"as {origin(witnesses[0])} saw it"
    if accused and accused <= accusers:
        whom = "each other" if len(accused) > 1 else "the others"  # A rank that loses the store reports rank 0 as lost.
        return Failure("lost link", f"{format_ranks(accused, {})} lost {whom}{at}")
    lost = accused - accusers
    hosts: dict[bool, set[str]] = {True: set(), False: set()}  # hosts[True] has the hosts of lost ranks.
    for incident in incidents:
        if (rank := reporting_rank(incident)) >= 0:
            hosts[rank in lost].add(incident["host"])
    if hosts[True] and not hosts[True] & hosts[False]:
        on = ", ".join(sorted(hosts[True]))
        return Failure("lost node", f"{format_ranks(lost, {})} on {on} stopped responding{at}, {seen_by}")
    seconds = max((s for incident in witnesses for s in lost_ranks(incident).values() if s is not None), default=None)
    silence = "" if seconds is None else f" for {seconds:.0f} s"
    return Failure("silent rank", f"{format_ranks(lost or accused, {})} sent no heartbeat{silence}{at}, {seen_by}")


def _exit_code_failure(found: Sequence[Incident], ended: dict[str, Any]) -> Failure | None:
    """Return the failure if a rank or the run ended with an exit code or a stop signal that no incident explains."""
    ends = [incident for incident in found if incident["kind"] in ("rank ended", "end")]
    for incident in [*ends, INCIDENT_DEFAULTS | ended]:
        name = incident["signal"]
        if code := 128 + signal.Signals[name] if name else incident["exit_code"]:
            who = "the run" if incident["rank"] < 0 else ended_rank(incident)
            how = f"was ended by {name}" if name else "ended"
            kinds = {2: "bad input", 128 + signal.SIGINT: "Ctrl-C", 128 + signal.SIGTERM: "SIGTERM"}
            return Failure(kinds.get(code, "exit code"), f"{who} {how} with exit code {code}{at_iteration(found)}")
    return None


def origin(incident: Incident) -> str:
    """Return the process that recorded an incident, such as "rank 3 (node004), iteration 634"."""
    rank, iteration = reporting_rank(incident), incident["iteration"]
    name = incident["who"].replace("_", " ", 1) if rank < 0 else f"rank {rank}"
    return f"{name} ({incident['host']})" + (f", iteration {iteration:,}" if iteration >= 0 else "")


def reporting_rank(incident: Incident) -> int:
    """Return the rank that recorded an incident, or -1 for a launcher."""
    found = re.fullmatch(r"rank_(\d+)", incident["who"])
    return int(found[1]) if found else -1


def ended_rank(incident: Incident) -> str:
    """Return the rank whose end a launcher reports."""
    return f"rank {incident['rank']} ({incident['host']})"


def lost_ranks(incident: Incident) -> dict[int, float | None]:
    """Return the ranks that an incident reports as lost, each with the seconds since its last heartbeat if they are
    recorded."""
    ranks = incident["ranks"] if incident["kind"] == "lost" else []
    return {rank: incident["silences"].get(str(rank)) for rank in ranks}


def at_iteration(found: Sequence[Incident]) -> str:
    """Return the last recorded iteration as text, such as " at iteration 9". Incidents of the start and of launchers
    may have no iteration."""
    known = max((incident["iteration"] for incident in found if incident["kind"] != "start"), default=-1)
    return f" at iteration {known:,}" if known >= 0 else ""
