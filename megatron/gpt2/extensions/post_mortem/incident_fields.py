"""The fields of an incident, read leniently: what a program of another version has noted may be of another type."""

import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Incident = Mapping[str, Any]


def said(one: Incident) -> str:
    """The text of an incident, or its reason, in one line."""
    return " ".join(str(one.get("text") or one.get("message") or one.get("reason") or "").split())


def place(one: Incident) -> str:
    """Who noted it: "rank 3 (node004), iteration 634"."""
    who, rank = str(one.get("who", "?")), own_rank(one)
    name = who.replace("_", " ", 1) if rank is None else f"rank {rank}"
    iteration = one.get("iteration", -1)
    at = f", iteration {iteration:,}" if isinstance(iteration, int) and iteration >= 0 else ""
    return f"{name} ({one.get('host', '?')}){at}"


def ranks_on(host: Any, found: Iterable[Incident]) -> set[int]:
    """The ranks of a machine, as far as they have noted anything."""
    return {rank for one in found if one.get("host") == host and (rank := own_rank(one)) is not None}


def own_rank(one: Incident) -> int | None:
    """The rank that noted it; None of a launcher."""
    found = re.fullmatch(r"rank_(\d+)", str(one.get("who", "")))
    return int(found[1]) if found else None


def ended_rank(one: Incident) -> str:
    """The rank that a launcher has seen end."""
    return f"rank {one['rank']} ({one.get('host', '?')})" if isinstance(one.get("rank"), int) else "a rank"


def signal_of(one: Incident) -> int | None:
    """The signal that ended a rank, given as a number, as its name, or as a negative exit code."""
    value = one.get("signal")
    if isinstance(value, str) and value in signal.Signals.__members__:
        return int(signal.Signals[value])
    if isinstance(value, int) and value in set(signal.Signals):
        return value
    code = exit_code(one)
    return -code if code is not None and -code in set(signal.Signals) else None


def exit_code(one: Mapping[str, Any]) -> int | None:
    """The exit code in an incident or in ended.json."""
    return next((value for key in ("exit_code", "exit code", "code") if isinstance(value := one.get(key), int)), None)


def lost_ranks(one: Incident) -> dict[int, float | None]:
    """The ranks that somebody has lost, each with the seconds of its silence where they are known."""
    value = one.get("silences", one.get("ranks"))
    if isinstance(value, Mapping):
        return {int(rank): seconds for rank, seconds in value.items() if str(rank).isdecimal()}
    return dict.fromkeys(ranks_in(one, "ranks"))


def ranks_in(one: Incident, *names: str) -> list[int]:
    """The ranks in the first of these details that there is, else those that the text names."""
    for name in names:
        if isinstance(value := one.get(name), list | tuple | Mapping):
            return [int(rank) for rank in value if str(rank).isdecimal()]
        if isinstance(value, int):
            return [value]
    found = re.search(r"ranks? ([\d\-, and()\w]*)", str(one.get("text", "")))
    return [
        rank
        for first, last in re.findall(r"\b(\d+)(?:-(\d+))?\b(?![^(]*\))", found[1] if found else "")
        for rank in range(int(first), min(int(last or first), int(first) + 4096) + 1)
    ]


def ranks_in_words(ranks: Iterable[int]) -> str:
    """ "rank 3", "ranks 1, 2 and 5"; "" of none."""
    words = [f"{rank}" for rank in sorted(set(ranks))]
    return (
        "" if not words else f"rank {words[0]}" if len(words) == 1 else f"ranks {', '.join(words[:-1])} and {words[-1]}"
    )


def at_iteration(one: Incident, found: Sequence[Incident]) -> str:
    """The furthest iteration that is known, beyond where the ranks started: a launcher may know none."""
    known = [
        value
        for other in (one, *found)
        if other.get("kind") != "start" and isinstance(value := other.get("iteration"), int) and value >= 0
    ]
    return f" at iteration {max(known):,}" if known else ""


def program_line(text: str) -> str:
    """The last place in a text that is of this project: "megatron/gpt2/train/loop.py:31"."""
    found = re.findall(r'((?:megatron/gpt2|mpu|data_utils)/[\w/]+\.py)"?(?:, line |:)(\d+)', text)
    return ":".join(found[-1]) if found else ""
