"""Of what did a run die? The first cause, out of what its processes have noted (`incidents`).

A death has many witnesses: a rank that is killed writes nothing, its launcher notes a signal, the others lose it, fail
in a collective, and are ended in turn. What is named is the first that is no consequence of another. All here are
functions of what was read; nothing looks at the disk.
"""

import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from megatron.gpt2.extensions.post_mortem.incident_fields import (
    Incident,
    at_iteration,
    ended_rank,
    exit_code,
    lost_ranks,
    own_rank,
    place,
    program_line,
    ranks_in,
    ranks_in_words,
    ranks_on,
    said,
    signal_of,
)

TOGETHER = 600.0  # seconds within which the ranks of one attempt start
SCHEDULER = 2.0  # seconds within which a scheduler ends all ranks
# An error that says that another rank is gone: not what died first.
OF_OTHERS = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|closed by peer|socket|gloo|nccl|"
    r"timed out|timeout|heartbeat|was lost|left before",
    re.IGNORECASE,
)
MEMORY = re.compile(r"out of memory|can't allocate memory|bad_alloc|MemoryError|Cannot allocate", re.IGNORECASE)
DISK = re.compile(
    r"no space left|cannot write its|disk quota|file too large|read-only file system|is not saved|"
    r"input/output error",
    re.IGNORECASE,
)
CHECKPOINT = re.compile(r"no valid checkpoint|sha256|iter_\d{7}", re.IGNORECASE)
NOT_FINITE = re.compile(r"FloatingPointError|not finite|\bNaN\b|--max-skipped-steps")
MISSING = re.compile("did not come within")
CHANGED = re.compile(r"StateChanged|memory of a rank has changed")
DATA = re.compile(r"is damaged|holds the token id|\.idx|\.bin\b", re.IGNORECASE)
LOADING = re.compile(r"data_utils/|training/data\.py|dataloader|DataLoader|indexed_dataset|samplers")
ASKED = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1}


class Death(NamedTuple):
    """kind: in two or three words. what: the first cause, with rank, host and iteration. means: what that says. do:
    what to do before the run goes on. well: it ended as asked."""

    kind: str
    what: str
    means: str
    do: str
    well: bool = False


def last_attempt(incidents: Sequence[Incident]) -> list[Incident]:
    """Those of the last start of the ranks: a folder may have seen many starts, by a person or by --max-restarts. A
    start by a person that was refused counts until something else happens, and takes no part in that."""
    if incidents and incidents[-1].get("kind") == "refused" and not incidents[-1].get("attempt"):
        refused = {str(one.get("who")): one for one in incidents if one.get("kind") == "refused"}
        return [one for one in refused.values() if one["time"] > incidents[-1]["time"] - TOGETHER]
    starts = {str(one["who"]): one for one in incidents if one.get("kind") == "start" and "who" in one}
    if not starts:
        return list(incidents)
    latest = max(starts.values(), key=lambda one: one["time"])
    begun = min(
        one["time"]
        for one in starts.values()
        if one.get("attempt", 0) == latest.get("attempt", 0) and one["time"] > latest["time"] - TOGETHER
    )
    have = {(who, one.get("attempt")) for who, one in starts.items() if one["time"] >= begun}
    return [
        one
        for one in incidents
        if one["time"] >= begun
        and not (one.get("kind") == "refused" and (str(one.get("who")), one.get("attempt")) in have)
    ]


def cause_of(incidents: Sequence[Incident], ended: Mapping[str, Any] | None, notes: Sequence[str] = ()) -> Death:
    """The first cause in the last attempt. ended: what ended.json says of it. notes: the run's own lines of warnings
    and of its end, from history.jsonl."""
    found = last_attempt(incidents)
    death = _first(found, ended, notes)
    if loop := _last(found, "crash loop"):
        again = said(loop) or "the same step failed again and again"
        return death._replace(
            kind=f"crash loop: {death.kind}",
            means=f"{again}; {death.means}",
            do=f"it was started again and died at the same step: {death.do}",
        )
    return death


def _first(found: Sequence[Incident], ended: Mapping[str, Any] | None, notes: Sequence[str]) -> Death:
    if ended is not None and ended.get("exit_code") == 0:
        reason = str(ended.get("reason") or "") or "it is finished"
        return Death(
            "ended well",
            f"nothing: {reason}",
            f"the run ended as asked, at iteration {_number(ended.get('iteration'))}",
            "nothing",
            well=True,
        )
    candidates = [death for one in found for death in _own_causes(one, found)]
    if candidates:
        return candidates[0]
    if lost := [one for one in found if one.get("kind") == "lost"]:
        return _of_lost(lost, found)
    if code := _ended_code(found, ended):
        return _of_code(code, found, notes)
    if stopped := _last(found, "stop"):
        return Death(
            "ended while it stopped",
            f"{place(stopped)} was told to stop ({said(stopped)}) and did not come to its end",
            "the time between the signal and the kill was too short for a save",
            "give it more time (Slurm: --signal=TERM@120), or nothing",
        )
    last = found[-1] if found else {}
    return Death(
        "without a word",
        f"no process has noted how it ended; the last word is of {place(last)}"
        if found
        else "no process has left a word",
        "all processes ended at once and unasked: the machine lost its power or was reset, or the whole job was killed",
        "ask the scheduler's log and the machine's own",
    )


def _own_causes(one: Incident, found: Sequence[Incident]) -> Iterator[Death]:
    """What an incident is the first cause of, if it is no consequence of another. A refusal is one where nothing came
    before it."""
    kind, text = one.get("kind"), said(one)
    if kind == "error" and not OF_OTHERS.search(text) or kind == "refused" and one is found[0]:
        yield of_error(one)
    elif kind == "replica":
        yield of_error({**one, "text": f"{text} (the memory of a rank has changed)"})
    elif kind == "hang":
        yield _of_hang(one, found)
    elif (
        kind == "rank ended"
        and one.get("first") is not False
        and (number := signal_of(one)) is not None
        and number not in ASKED
    ):
        yield _of_signal(one, number, found)
    elif kind == "not finite" and _is_end_of(one, found):
        yield of_error({**one, "text": f"not finite: {text}"})


# Of an error that a rank has noted, or the run's own last line: kind, pattern, what it means, what to do.
ERRORS = (
    (
        "out of memory",
        MEMORY,
        "this layout needs more memory than there was",
        "give --checkpoint-activations, a smaller --micro-batch-size or more model parallelism: tools/plan.py lists what "
        "fits",
    ),
    (
        "not finite",
        NOT_FINITE,
        "many steps held NaN or Inf: the training diverged, or a device is faulty",
        "look at the loss before it in metrics.jsonl; a lower --lr may help, from an earlier checkpoint",
    ),
    (
        "replica drift",
        CHANGED,
        "a rank computed or kept other numbers than it should: faulty memory or a faulty device",
        "leave that machine out, and go on from a checkpoint before it",
    ),
    (
        "full disk",
        DISK,
        "the disk took no more",
        "make room or give another --save; the last checkpoint that was committed is whole",
    ),
    (
        "damaged checkpoint",
        CHECKPOINT,
        "a file is not as it was written",
        "nothing, where an older checkpoint is valid: it is taken; else give another --load",
    ),
    (
        "missing ranks",
        MISSING,
        "they were not started, or do not reach the others",
        "start them, or look at the network between the machines",
    ),
    (
        "damaged data",
        DATA,
        "a token file is not as it was written",
        "write it anew: tools/inspect_data.py --verify says where it is damaged",
    ),
)


def of_error(one: Incident) -> Death:
    """Of an error that a rank has noted itself, or of a line of the run's own, which has no rank."""
    text, at = said(one), program_line(str(one.get("at", "")))
    what = f"{place(one)}: {text}" + f", at {at}" * bool(at) if "who" in one else text
    for kind, pattern, means, do in ERRORS:
        if pattern.search(text):
            return Death(kind, what, means, do)
    if exit_code(one) == 2:
        return Death("bad input", what, "the command line or a file was refused", "mend what the line names")
    return Death(
        "an error of the program",
        what,
        "its traceback is in the log of that rank",
        "the same command may die again at the same step: report it with the traceback",
    )


def _of_signal(one: Incident, number: int, found: Sequence[Incident]) -> Death:
    name, who = signal.Signals(number).name, ended_rank(one)
    at_once = {
        ended_rank(other)
        for other in found
        if other.get("kind") == "rank ended"
        and signal_of(other) == number
        and other.get("first") is not False
        and abs(other["time"] - one["time"]) < SCHEDULER
    }
    what = f"{who} was ended by {name}{at_iteration(one, found)}"
    if number != signal.SIGKILL:
        return Death(
            "crashed rank",
            what,
            "its process crashed in a library or a driver, or its memory is faulty",
            "look at the log of that rank; where it is always the same machine, leave it out",
        )
    here = ranks_on(one.get("host"), found)
    killed = {
        rank
        for other in found
        if other.get("kind") == "rank ended" and signal_of(other) == number
        for rank in ranks_in(other, "rank")
    }
    accused = {
        rank
        for other in found
        if other.get("kind") == "lost" and own_rank(other) not in here
        for rank in lost_ranks(other)
    }
    if len(here) > 1 and here <= killed & accused:  # who was ended for another's sake did not fall silent with it
        return Death(
            "lost node",
            f"{ranks_in_words(here)}, all of {one.get('host')}, were ended by {name} at once{at_iteration(one, found)}",
            "a person, the scheduler, or the system for want of memory (the "
            "machine's own log says so) ended all ranks of the machine; its launcher lived on",
            "leave that machine out where it happens again",
        )
    if len(at_once) > 1:
        return Death(
            "killed job",
            f"{len(at_once)} ranks were ended by {name} at once{at_iteration(one, found)}, {who} first",
            "a scheduler or a person ended the job",
            "nothing; with Slurm, --signal=TERM@120 lets it save first",
        )
    return Death(
        "killed rank",
        what,
        "a person, the scheduler, or the system for want of memory (the machine's own log says so) ended it",
        "nothing, unless the system did: then give the ranks less to hold",
    )


def _of_hang(one: Incident, found: Sequence[Incident]) -> Death:
    """Every rank notes its own place, and one of each machine the `ranks` that the others waited for."""
    whole = next((other for other in found if other.get("kind") == "hang" and "ranks" in other), one)
    missing = ranks_in(whole, "ranks")
    stacks = [
        other["stack"]
        for other in found
        if other.get("kind") == "hang" and own_rank(other) in missing and "ranks" not in other and other.get("stack")
    ]
    stack = "\n".join(map(str, stacks[0] if isinstance(stacks[0], list) else stacks[:1])) if stacks else ""
    where = f", at {line}" if (line := program_line(stack)) else ""
    who = ranks_in_words(missing) or "a rank"
    what = f"{who} did not come to a collective that the others had entered{where}{at_iteration(whole, found)}"
    if LOADING.search(stack):
        return Death(
            "hang in data loading",
            what,
            "a rank waits for its data: a file system does not answer",
            "look at the file system of the data from that machine",
        )
    return Death(
        "hang",
        what,
        "a rank is stopped, waits for something else, or took another branch than the others",
        "look at that rank's machine; where the line is of the program, report it with the stacks",
    )


def _of_lost(lost: Sequence[Incident], found: Sequence[Incident]) -> Death:
    """Ranks that fell silent, and nobody saw how they ended."""
    accused = {rank for one in lost for rank in lost_ranks(one)}
    accusers = {own_rank(one) for one in lost} - {None}
    first = lost[0]
    silent, means_more = ranks_in_words(accused), f"as {place(first)} saw it"
    if accused and accused <= accusers:
        whom = "each other" if len(accused) > 1 else "the others"  # who loses the store says that rank 0 is silent
        return Death(
            "lost link",
            f"{silent} lost {whom}{at_iteration(first, found)}",
            "all of them lived on: the network between their machines failed",
            "look at the network; tools/bench_collectives.py measures it",
        )
    gone = accused - accusers
    hosts = {str(one.get("host")) for one in found if own_rank(one) in gone}
    others = {str(one.get("host")) for one in found if own_rank(one) is not None and own_rank(one) not in gone}
    if hosts and not hosts & others:
        return Death(
            "lost node",
            f"{ranks_in_words(gone)} on {', '.join(sorted(hosts))} fell silent"
            f"{at_iteration(first, found)}, {means_more}",
            "all ranks of the machine are gone, and its launcher as well: the machine or its network died",
            "leave that machine out, or wait for it; the run continues on any number of ranks that divides its batch",
        )
    seconds = max((s for one in lost for s in lost_ranks(one).values() if isinstance(s, int | float)), default=None)
    silence = "" if seconds is None else f" for {seconds:.0f} s"
    return Death(
        "silent rank",
        f"{ranks_in_words(gone) or silent} gave no sign of life{silence}{at_iteration(first, found)}, {means_more}",
        "its process was stopped or killed, or its machine does not run it any more",
        "look at that machine; nothing, where it is well",
    )


def _of_code(code: int, found: Sequence[Incident], notes: Sequence[str]) -> Death:
    """An end with this exit code that no rank explains by an incident: the run's own lines may."""
    # That an iteration is not saved comes last, and why it is not before that.
    for note in sorted(reversed(notes), key=lambda note: "is not saved" in note):
        if note.startswith("stopped: ") or any(pattern.search(note) for _, pattern, *_ in ERRORS):
            return of_error({"text": note.removeprefix("stopped: ").removeprefix("WARNING: "), "exit_code": code})
    if code in (130, -signal.SIGINT):
        return Death("Ctrl-C", "a person pressed Ctrl-C twice, or before the first step", "nothing failed", "nothing")
    if code in (143, -signal.SIGTERM):
        return Death(
            "SIGTERM",
            "the ranks were ended by SIGTERM before they could save",
            "a scheduler or a person ended them",
            "nothing",
        )
    if code == 2:
        return Death(
            "bad input",
            "the command line or a file was refused, with exit code 2",
            "the line that begins with error: says why",
            "mend what it names",
        )
    who = next((ended_rank(one) for one in found if one.get("kind") == "rank ended"), "a rank")
    return Death(
        f"exit code {code}",
        f"{who} ended with exit code {code}{at_iteration({}, found)}",
        "it failed, and its reason is in its log alone",
        "look at the last lines of its log",
    )


def _ended_code(found: Sequence[Incident], ended: Mapping[str, Any] | None) -> int:
    """The first exit code that is not 0; that of a signal as a shell has it; 0 where there is none."""
    for one in found:
        if one.get("kind") in ("rank ended", "end"):
            number = signal_of(one) if one.get("kind") == "rank ended" else None
            if code := (128 + number if number is not None else exit_code(one)):
                return code
    return exit_code(ended or {}) or 0


def _is_end_of(one: Incident, found: Sequence[Incident]) -> bool:
    """Whether the run ended by it: a skipped step or two are no death."""
    return not any(
        other["time"] > one["time"]
        and (
            other.get("kind") in ("lost", "hang")
            or other.get("kind") == "rank ended"
            and signal_of(other) is not None
            or other.get("kind") == "error"
            and not NOT_FINITE.search(said(other))
        )
        for other in found
    )


def _last(found: Sequence[Incident], kind: str) -> Incident | None:
    return next((one for one in reversed(found) if one.get("kind") == kind), None)


def _number(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else "?"
