"""Failure analysis: the first cause of a run's end, out of what its processes have noted (`monitor/incidents.py`).

One end has many witnesses: a rank that is killed writes nothing, its launcher notes a signal, the others lose it, fail
in a collective, and are ended in turn. The first incident that is not a consequence of a different one is named.
Nothing here looks at the disk.
"""

import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from megatron.gpt2.dist.ranks import named

Incident = Mapping[str, Any]

TOGETHER = 600.0  # seconds within which the ranks of one attempt start
SCHEDULER = 2.0  # seconds within which a scheduler ends all ranks
LOADING = re.compile(r"data_utils/|train/data\.py|dataloader|DataLoader")  # a line of a stack
ASKED = {"SIGTERM", "SIGINT", "SIGUSR1"}
KILLER = "a person, the scheduler, or the system for want of memory (the machine's own log says so) ended"
LOOK = "look at that machine; nothing, if it is well"

# What each kind of death means, and what to do before the run continues. Those of errors are the `cause` that the
# incident has.
KINDS = {
    "out of memory": (
        "this layout needs more memory than there was",
        "give --checkpoint-activations, a smaller --micro-batch-size or more model parallelism: tools/plan.py lists what "
        "fits",
    ),
    "not finite": (
        "many steps held NaN or Inf: the training diverged, or a device is faulty",
        "look at the loss before it in metrics.jsonl; a lower --lr may help, from an earlier checkpoint",
    ),
    "replica drift": (
        "a rank computed or kept different numbers than it should: faulty memory or a faulty device",
        "leave that machine out, and continue from a checkpoint before it",
    ),
    "full disk": (
        "the disk took no more, or not in time",
        "make room or give another --save; the last checkpoint that was committed is whole",
    ),
    "damaged checkpoint": (
        "a file is not as it was written",
        "nothing, if an older checkpoint is valid: it is taken; otherwise give another --load",
    ),
    "missing ranks": (
        "they were not started, or do not reach the others",
        "start them, or look at the network between the machines",
    ),
    "damaged data": (
        "a token file is not as it was written",
        "write it again: tools/inspect_data.py --verify says where it is damaged",
    ),
    "bad input": ("the command line or a file was refused", "fix what the line that begins with error: names"),
    "an error of the program": (
        "its traceback is in the log of that rank",
        "the same command may fail again at the same step: report it with the traceback",
    ),
    "crashed rank": (
        "its process crashed in a library or a driver, or its memory is faulty",
        "look at the log of that rank; if it is always the same machine, leave it out",
    ),
    "killed rank": (f"{KILLER} it", "nothing, unless the system did: then give the ranks less to hold"),
    "killed job": (
        "a scheduler or a person ended the job",
        "nothing; with Slurm, --signal=TERM@120 lets it save first",
    ),
    "killed node": (
        f"{KILLER} all ranks of the machine; its launcher lived on",
        "leave that machine out if it happens again",
    ),
    "lost node": (
        "all ranks of the machine are gone, and its launcher as well: the machine or its network died",
        "leave that machine out, or wait for it; the run continues on any number of ranks that divides its batch",
    ),
    "lost link": (
        "all of them lived on: the network between their machines failed",
        "look at the network; tools/bench_collectives.py measures it",
    ),
    "silent rank": ("its process was stopped or killed, or its machine does not run it any more", LOOK),
    "hang": (
        "a rank is stopped, waits for something else, or took a different branch than the others",
        "look at that rank's machine; if the line is of the program, report it with the stacks",
    ),
    "hang in data loading": (
        "a rank waits for its data: a file system does not answer",
        "look at the file system of the data from that machine",
    ),
    "Ctrl-C": ("a person pressed it twice, or before the first step", "nothing"),
    "SIGTERM": ("a scheduler or a person ended the ranks before they could save", "nothing"),
    "without a word": (
        "all processes ended at once and unasked: the machine lost its power or was reset, or the whole job was killed",
        "look at the scheduler's log and the machine's own",
    ),
    "ended well": ("the run ended as asked", "nothing"),
}


class Death(NamedTuple):
    """kind: in two or three words. what: the first cause, with rank, host and iteration. means: how to read that. do:
    what to do before the run continues."""

    kind: str
    what: str
    means: str
    do: str

    @property
    def well(self) -> bool:
        """Whether the run ended as asked."""
        return self.kind == "ended well"


def of_kind(kind: str, what: str) -> Death:
    """The death of one of the KINDS."""
    return Death(kind, what, *KINDS[kind])


def last_attempt(incidents: Sequence[Incident]) -> list[Incident]:
    """Return those of the last start of the ranks: a folder may have seen many starts, by a person or by
    --max-restarts. A start by a person that was refused counts until something else happens, and takes no part in
    that."""
    if incidents and incidents[-1]["kind"] == "refused" and not incidents[-1].get("attempt"):
        refused = {one["who"]: one for one in incidents if one["kind"] == "refused"}
        return [one for one in refused.values() if one["time"] > incidents[-1]["time"] - TOGETHER]
    starts = {one["who"]: one for one in incidents if one["kind"] == "start"}
    if not starts:
        return list(incidents)
    latest = max(starts.values(), key=lambda one: one["time"])
    of_latest = [one for one in starts.values() if one.get("attempt") == latest.get("attempt")]
    begun = min(one["time"] for one in of_latest if one["time"] > latest["time"] - TOGETHER)
    started = {(who, one.get("attempt")) for who, one in starts.items() if one["time"] >= begun}
    return [
        one
        for one in incidents
        if one["time"] >= begun and not (one["kind"] == "refused" and (one["who"], one.get("attempt")) in started)
    ]


def cause_of(incidents: Sequence[Incident], ended: Mapping[str, Any] | None) -> Death:
    """Return the first cause in the last attempt. ended: what ended.json says of it."""
    found = last_attempt(incidents)
    if ended is not None and ended.get("exit_code") == 0:
        iteration = ended.get("iteration")
        at = f", at iteration {iteration:,}" if isinstance(iteration, int) else ""
        return of_kind("ended well", f"nothing: {ended.get('reason') or 'it is finished'}{at}")
    deaths = (death for one in found if (death := _own_cause(one, found)))
    death = next(deaths, None) or _of_lost(found) or _of_code(found, ended) or _without_a_word(found)
    loops = [one["text"] for one in found if one["kind"] == "crash loop"]
    if not loops:
        return death
    return Death(
        f"crash loop: {death.kind}",
        death.what,
        f"{loops[-1]}; {death.means}",
        f"it was started again and died at the same step: {death.do}",
    )


def _own_cause(one: Incident, found: Sequence[Incident]) -> Death | None:
    """The death that an incident is the first cause of; None if it is a consequence of a different incident."""
    kind = one["kind"]
    if kind == "error" and one.get("cause") != "another rank" or kind == "refused" and one is found[0]:
        cause = str(one.get("cause") or ("bad input" if one.get("exit_code") == 2 else ""))
        at = f", at {one['at']}" if one.get("at") else ""
        return of_kind(cause if cause in KINDS else "an error of the program", f"{place(one)}: {one['text']}{at}")
    if kind == "hang":
        return _of_hang([other for other in found if other["kind"] == "hang"], found)
    if kind == "rank ended" and one.get("first") is not False and one.get("signal", "SIGTERM") not in ASKED:
        return _of_signal(one, found)
    return None


def _of_signal(one: Incident, found: Sequence[Incident]) -> Death:
    """A launcher has seen a rank end by a signal."""
    name, at = one["signal"], at_iteration(found)
    how = f"{ended_rank(one)} was ended by {name}{at}"
    if name != "SIGKILL":
        return of_kind("crashed rank", how)
    killed = [other for other in found if other["kind"] == "rank ended" and other.get("signal") == name]
    # A rank that was ended for another's sake did not fall silent with it.
    here = {own_rank(other) for other in found if other.get("host") == one["host"]} - {None}
    accused = {rank for other in found if own_rank(other) not in here for rank in lost(other)}
    if len(here) > 1 and here <= {other["rank"] for other in killed} & accused:
        return of_kind("killed node", f"{_words(here)}, all of {one['host']}, were ended by {name} at once{at}")
    first = [other for other in killed if other.get("first") is not False]
    at_once = {ended_rank(other) for other in first if abs(other["time"] - one["time"]) < SCHEDULER}
    if len(at_once) > 1:
        what = f"{len(at_once)} ranks were ended by {name} at once{at}, {ended_rank(one)} first"
        return of_kind("killed job", what)
    return of_kind("killed rank", how)


def _of_hang(hangs: Sequence[Incident], found: Sequence[Incident]) -> Death:
    """Every rank notes its own place, and one of each machine the `ranks` that the others waited for."""
    missing: list[int] = next((one["ranks"] for one in hangs if "ranks" in one), [])
    stacks = [one["stack"] for one in hangs if own_rank(one) in missing and one.get("stack")]
    stack: list[str] = stacks[0] if stacks else []
    ours = [line.partition(" ")[0] for line in stack if re.match("(megatron|mpu|data_utils)/", line)]
    who, at = _words(missing) if missing else "a rank", f", at {ours[-1]}" if ours else ""
    kind = "hang in data loading" if any(LOADING.search(line) for line in stack) else "hang"
    return of_kind(kind, f"{who} did not come to a collective that the others had entered{at}{at_iteration(found)}")


def _of_lost(found: Sequence[Incident]) -> Death | None:
    """Ranks fell silent, and nobody saw how they ended."""
    witnesses = [one for one in found if one["kind"] == "lost"]
    if not witnesses:
        return None
    accused = {rank for one in witnesses for rank in lost(one)}
    accusers = {own_rank(one) for one in witnesses} - {None}
    at, seen_by = at_iteration(found), f"as {place(witnesses[0])} saw it"
    if accused and accused <= accusers:
        whom = "each other" if len(accused) > 1 else "the others"  # who loses the store says that rank 0 is silent
        return of_kind("lost link", f"{_words(accused)} lost {whom}{at}")
    gone = accused - accusers
    hosts = {one["host"] for one in found if own_rank(one) in gone}
    others = {one["host"] for one in found if own_rank(one) is not None and own_rank(one) not in gone}
    if hosts and not hosts & others:
        on = ", ".join(sorted(hosts))
        return of_kind("lost node", f"{_words(gone)} on {on} fell silent{at}, {seen_by}")
    seconds = max((s for one in witnesses for s in lost(one).values() if s is not None), default=None)
    silence = "" if seconds is None else f" for {seconds:.0f} s"
    return of_kind("silent rank", f"{_words(gone or accused)} gave no sign of life{silence}{at}, {seen_by}")


def _of_code(found: Sequence[Incident], ended: Mapping[str, Any] | None) -> Death | None:
    """A rank or the run ended with an exit code, or a signal that asks for an end, that no incident explains."""
    for one in (*(one for one in found if one["kind"] in ("rank ended", "end")), ended or {}):
        name = one.get("signal")
        code = 128 + signal.Signals[name] if name else one.get("exit_code")
        if not code:
            continue
        who, how = ended_rank(one) if "rank" in one else "the run", f"was ended by {name}" if name else "ended"
        what = f"{who} {how} with exit code {code}{at_iteration(found)}"
        kinds = {2: "bad input", 128 + signal.SIGINT: "Ctrl-C", 128 + signal.SIGTERM: "SIGTERM"}
        if code in kinds:
            return of_kind(kinds[code], what)
        means, do = "it failed, and its reason is only in its log", "look at the last lines of its log"
        return Death(f"exit code {code}", what, means, do)
    return None


def _without_a_word(found: Sequence[Incident]) -> Death:
    last = f"no process has noted how it ended; the last word is of {place(found[-1])}" if found else ""
    return of_kind("without a word", last or "no process has left a word")


def place(one: Incident) -> str:
    """Who noted it: "rank 3 (node004), iteration 634"."""
    rank, iteration = own_rank(one), one.get("iteration", -1)
    name = one["who"].replace("_", " ", 1) if rank is None else f"rank {rank}"
    return f"{name} ({one.get('host', '?')})" + (f", iteration {iteration:,}" if iteration >= 0 else "")


def own_rank(one: Incident) -> int | None:
    """The rank that noted it; None of a launcher."""
    found = re.fullmatch(r"rank_(\d+)", one["who"])
    return int(found[1]) if found else None


def ended_rank(one: Incident) -> str:
    """The rank that a launcher has seen end."""
    return f"rank {one['rank']} ({one.get('host', '?')})"


def lost(one: Incident) -> dict[int, float | None]:
    """The ranks that an incident says are lost, each with the seconds of its silence if they are known; none if it says
    something else."""
    silences, ranks = one.get("silences", {}), one["ranks"] if one["kind"] == "lost" and "ranks" in one else []
    return {int(rank): silences.get(str(rank)) for rank in ranks}


def _words(ranks: Iterable[int | None]) -> str:
    return named([rank for rank in ranks if rank is not None], {})


def at_iteration(found: Sequence[Incident]) -> str:
    """The furthest iteration that is known, beyond the one at which the ranks started: a launcher may not have any."""
    known = max((one.get("iteration", -1) for one in found if one["kind"] != "start"), default=-1)
    return f" at iteration {known:,}" if known >= 0 else ""
