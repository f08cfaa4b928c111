"""Failure analysis: the first cause of a run's end, out of what its processes have noted (`monitor/incidents.py`).

One end has many witnesses: a rank that is killed writes nothing, its launcher notes a signal, the others lose it, fail
in a collective, and are ended in turn. The first incident that is not a consequence of a different one is named.
Nothing here looks at the disk.
"""

import re
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

Incident = Mapping[str, Any]

TOGETHER = 600.0  # seconds within which the ranks of one attempt start
SCHEDULER = 2.0  # seconds within which a scheduler ends all ranks
LOADING = re.compile(r"data_utils/|train/data\.py|dataloader|DataLoader")  # a line of a stack
ASKED = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1}


class Death(NamedTuple):
    """kind: in two or three words. what: the first cause, with rank, host and iteration. means: how to read that. do:
    what to do before the run continues. well: it ended as asked."""

    kind: str
    what: str
    means: str
    do: str
    well: bool = False


# By the `cause` that an incident has: what it means, and what to do.
CAUSES = {
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
        "the disk took no more",
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
    "bad input": ("the command line or a file was refused", "fix what the line names"),
    "an error of the program": (
        "its traceback is in the log of that rank",
        "the same command may fail again at the same step: report it with the traceback",
    ),
}


def last_attempt(incidents: Sequence[Incident]) -> list[Incident]:
    """Those of the last start of the ranks: a folder may have seen many starts, by a person or by --max-restarts. A
    start by a person that was refused counts until something else happens, and takes no part in that."""
    if incidents and incidents[-1]["kind"] == "refused" and not incidents[-1].get("attempt"):
        refused = {one["who"]: one for one in incidents if one["kind"] == "refused"}
        return [one for one in refused.values() if one["time"] > incidents[-1]["time"] - TOGETHER]
    starts = {one["who"]: one for one in incidents if one["kind"] == "start"}
    if not starts:
        return list(incidents)
    latest = max(starts.values(), key=lambda one: one["time"])
    begun = min(
        one["time"]
        for one in starts.values()
        if one.get("attempt") == latest.get("attempt") and one["time"] > latest["time"] - TOGETHER
    )
    have = {(who, one.get("attempt")) for who, one in starts.items() if one["time"] >= begun}
    return [
        one
        for one in incidents
        if one["time"] >= begun and not (one["kind"] == "refused" and (one["who"], one.get("attempt")) in have)
    ]


def cause_of(incidents: Sequence[Incident], ended: Mapping[str, Any] | None, notes: Sequence[str] = ()) -> Death:
    """The first cause in the last attempt. ended: what ended.json says of it. notes: the run's own lines of warnings
    and of its end, from history.jsonl."""
    found = last_attempt(incidents)
    death = _first(found, ended, notes)
    if loop := _last(found, "crash loop"):
        again = loop["text"] or "the same step failed again and again"
        return death._replace(
            kind=f"crash loop: {death.kind}",
            means=f"{again}; {death.means}",
            do=f"it was started again and died at the same step: {death.do}",
        )
    return death


def _first(found: Sequence[Incident], ended: Mapping[str, Any] | None, notes: Sequence[str]) -> Death:
    if ended is not None and ended.get("exit_code") == 0:
        reason, iteration = ended.get("reason") or "it is finished", ended.get("iteration")
        at = f"{iteration:,}" if isinstance(iteration, int) else "?"
        return Death(
            "ended well", f"nothing: {reason}", f"the run ended as asked, at iteration {at}", "nothing", well=True
        )
    if death := next((death for one in found for death in _own_causes(one, found)), None):
        return death
    if lost := [one for one in found if one["kind"] == "lost"]:
        return _of_lost(lost, found)
    if code := _ended_code(found, ended):
        return _of_code(code, found, notes)
    if stopped := _last(found, "stop"):
        return Death(
            "ended while it stopped",
            f"{place(stopped)} was told to stop ({stopped['text']}) and did not reach its end",
            "the time between the signal and the kill was too short for a save",
            "give it more time (Slurm: --signal=TERM@120), or nothing",
        )
    last_word = f"no process has noted how it ended; the last word is of {place(found[-1])}" if found else ""
    return Death(
        "without a word",
        last_word or "no process has left a word",
        "all processes ended at once and unasked: the machine lost its power or was reset, or the whole job was killed",
        "look at the scheduler's log and the machine's own",
    )


def _own_causes(one: Incident, found: Sequence[Incident]) -> Iterator[Death]:
    """The death that an incident is the first cause of, if it is not a consequence of a different incident. A refusal
    is one if nothing was before it."""
    kind = one["kind"]
    if kind == "error" and one.get("cause") != "another rank" or kind == "refused" and one is found[0]:
        yield _of_error(one)
    elif kind == "replica":
        yield _of_error({**one, "cause": "replica drift"})
    elif kind == "hang":
        yield _of_hang(one, found)
    elif kind == "rank ended" and one.get("first") is not False and one.get("signal"):
        if signal.Signals[one["signal"]] not in ASKED:
            yield _of_signal(one, found)
    elif kind == "not finite" and _is_end_of(one, found):
        yield _of_error({**one, "cause": "not finite", "text": f"not finite: {one['text']}"})


def _of_error(one: Incident) -> Death:
    """A rank has noted an error itself."""
    kind = one.get("cause") or ("bad input" if one.get("exit_code") == 2 else "program")
    kind = kind if kind in CAUSES else "an error of the program"
    at = f", at {one['at']}" if one.get("at") else ""
    return Death(kind, f"{place(one)}: {one['text']}{at}", *CAUSES[kind])


def _of_signal(one: Incident, found: Sequence[Incident]) -> Death:
    name, who, at = one["signal"], ended_rank(one), at_iteration(one, found)
    ended = [other for other in found if other["kind"] == "rank ended" and other.get("signal") == name]
    if name != "SIGKILL":
        return Death(
            "crashed rank",
            f"{who} was ended by {name}{at}",
            "its process crashed in a library or a driver, or its memory is faulty",
            "look at the log of that rank; if it is always the same machine, leave it out",
        )
    by = "a person, the scheduler, or the system for want of memory (the machine's own log says so) ended"
    here = {rank for other in found if other.get("host") == one["host"] and (rank := own_rank(other)) is not None}
    killed = {other["rank"] for other in ended}
    accused = {
        rank for other in found if other["kind"] == "lost" and own_rank(other) not in here for rank in lost(other)
    }
    if (
        len(here) > 1 and here <= killed & accused
    ):  # a rank that was ended for another's sake did not fall silent with it
        return Death(
            "lost node",
            f"{ranks_in_words(here)}, all of {one['host']}, were ended by {name} at once{at}",
            f"{by} all ranks of the machine; its launcher lived on",
            "leave that machine out if it happens again",
        )
    at_once = {
        ended_rank(other)
        for other in ended
        if other.get("first") is not False and abs(other["time"] - one["time"]) < SCHEDULER
    }
    if len(at_once) > 1:
        return Death(
            "killed job",
            f"{len(at_once)} ranks were ended by {name} at once{at}, {who} first",
            "a scheduler or a person ended the job",
            "nothing; with Slurm, --signal=TERM@120 lets it save first",
        )
    return Death(
        "killed rank",
        f"{who} was ended by {name}{at}",
        f"{by} it",
        "nothing, unless the system did: then give the ranks less to hold",
    )


def _of_hang(one: Incident, found: Sequence[Incident]) -> Death:
    """Every rank notes its own place, and one of each machine the `ranks` that the others waited for."""
    hangs = [other for other in found if other["kind"] == "hang"]
    whole = next((other for other in hangs if "ranks" in other), one)
    missing = whole.get("ranks", [])
    stack: list[str] = next(
        (other["stack"] for other in hangs if own_rank(other) in missing and other.get("stack")), []
    )
    ours = [line.partition(" ")[0] for line in stack if re.match("(megatron|mpu|data_utils)/", line)]
    who = ranks_in_words(missing) or "a rank"
    what = f"{who} did not come to a collective that the others had entered" + (f", at {ours[-1]}" if ours else "")
    what += at_iteration(whole, found)
    if any(LOADING.search(line) for line in stack):
        return Death(
            "hang in data loading",
            what,
            "a rank waits for its data: a file system does not answer",
            "look at the file system of the data from that machine",
        )
    return Death(
        "hang",
        what,
        "a rank is stopped, waits for something else, or took a different branch than the others",
        "look at that rank's machine; if the line is of the program, report it with the stacks",
    )


def _of_lost(witnesses: Sequence[Incident], found: Sequence[Incident]) -> Death:
    """Ranks that fell silent, and nobody saw how they ended."""
    accused = {rank for one in witnesses for rank in lost(one)}
    accusers = {own_rank(one) for one in witnesses} - {None}
    first = witnesses[0]
    at, seen_by = at_iteration(first, found), f"as {place(first)} saw it"
    if accused and accused <= accusers:
        whom = "each other" if len(accused) > 1 else "the others"  # who loses the store says that rank 0 is silent
        return Death(
            "lost link",
            f"{ranks_in_words(accused)} lost {whom}{at}",
            "all of them lived on: the network between their machines failed",
            "look at the network; tools/bench_collectives.py measures it",
        )
    gone = accused - accusers
    hosts = {one["host"] for one in found if own_rank(one) in gone}
    others = {one["host"] for one in found if own_rank(one) is not None and own_rank(one) not in gone}
    if hosts and not hosts & others:
        return Death(
            "lost node",
            f"{ranks_in_words(gone)} on {', '.join(sorted(hosts))} fell silent{at}, {seen_by}",
            "all ranks of the machine are gone, and its launcher as well: the machine or its network died",
            "leave that machine out, or wait for it; the run continues on any number of ranks that divides its batch",
        )
    seconds = max((s for one in witnesses for s in lost(one).values() if s is not None), default=None)
    silence = "" if seconds is None else f" for {seconds:.0f} s"
    return Death(
        "silent rank",
        f"{ranks_in_words(gone or accused)} gave no sign of life{silence}{at}, {seen_by}",
        "its process was stopped or killed, or its machine does not run it any more",
        "look at that machine; nothing, if it is well",
    )


def _of_code(code: int, found: Sequence[Incident], notes: Sequence[str]) -> Death:
    """An end with this exit code that no rank explains by an incident: the run's own lines may."""
    # That an iteration is not saved is noted last; the line before it says why.
    stopped = next((note for note in reversed(notes) if note.startswith("stopped: ")), None)
    unsaved = next((note for note in reversed(notes) if note.startswith("WARNING: ") and "cannot write" in note), None)
    if (note := unsaved or stopped) is not None:
        kind = "full disk" if note is unsaved else "an error of the program"
        return Death(kind, note.removeprefix("stopped: ").removeprefix("WARNING: "), *CAUSES[kind])
    if code == 128 + signal.SIGINT:
        return Death("Ctrl-C", "a person pressed Ctrl-C twice, or before the first step", "nothing failed", "nothing")
    if code == 128 + signal.SIGTERM:
        what = "the ranks were ended by SIGTERM before they could save"
        return Death("SIGTERM", what, "a scheduler or a person ended them", "nothing")
    if code == 2:
        what = "the command line or a file was refused, with exit code 2"
        return Death("bad input", what, "the line that begins with error: says why", "fix what it names")
    who = next((ended_rank(one) for one in found if one["kind"] == "rank ended"), "a rank")
    return Death(
        f"exit code {code}",
        f"{who} ended with exit code {code}{at_iteration({}, found)}",
        "it failed, and its reason is only in its log",
        "look at the last lines of its log",
    )


def _ended_code(found: Sequence[Incident], ended: Mapping[str, Any] | None) -> int:
    """The first exit code that is not 0; that of a signal as a shell has it; 0 if there is none."""
    for one in (*(one for one in found if one["kind"] in ("rank ended", "end")), ended or {}):
        if code := 128 + signal.Signals[one["signal"]] if one.get("signal") else one.get("exit_code"):
            return int(code)
    return 0


def _is_end_of(one: Incident, found: Sequence[Incident]) -> bool:
    """Whether the run ended by it: a skipped step or two end nothing."""
    return not any(
        other["time"] > one["time"]
        and (
            other["kind"] in ("lost", "hang")
            or other["kind"] == "rank ended"
            and other.get("signal")
            or other["kind"] == "error"
            and other.get("cause") != "not finite"
        )
        for other in found
    )


def _last(found: Sequence[Incident], kind: str) -> Incident | None:
    return next((one for one in reversed(found) if one["kind"] == kind), None)


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
    """The ranks that an incident says are lost, each with the seconds of its silence if they are known."""
    silences = one.get("silences", {})
    return {int(rank): silences.get(str(rank)) for rank in one.get("ranks", [])}


def ranks_in_words(ranks: Iterable[int]) -> str:
    """ "rank 3", "ranks 1, 2 and 5"; "" of none."""
    *first, last = [""] * (not ranks) + [f"{rank}" for rank in sorted(set(ranks))]
    return f"ranks {', '.join(first)} and {last}" if first else f"rank {last}" if last else ""


def at_iteration(one: Incident, found: Sequence[Incident]) -> str:
    """The furthest iteration that is known, beyond the one at which the ranks started: a launcher may not have any."""
    known = max((other.get("iteration", -1) for other in (one, *found) if other.get("kind") != "start"), default=-1)
    return f" at iteration {known:,}" if known >= 0 else ""
