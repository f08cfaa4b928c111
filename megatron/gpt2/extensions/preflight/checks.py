"""The rows of the table: what all ranks have found, compared."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from megatron.gpt2.dist.ranks import named
from megatron.gpt2.extensions.preflight.alone import Facts

CLOCKS = 2.0  # seconds that clocks may be apart: what ranks note of a death is put in order by their clocks
SLOW_SAVE = 600.0  # seconds


class Row(NamedTuple):
    """A check: its name, what was found, and what to mend; "" where it is well."""

    name: str
    text: str
    mend: str = ""


def rows(found: Sequence[Facts]) -> list[Row]:
    """The checks of all ranks, whose facts are `found`, in the order of the table."""
    hosts = {rank: str(facts["host"]) for rank, facts in enumerate(found)}
    return [row for check in CHECKS for row in check(found, hosts)]


Hosts = Mapping[int, str]
Check = Callable[[Sequence[Facts], Hosts], Iterator[Row]]


def others(found: Sequence[Facts], value: Callable[[Facts], Any]) -> list[int]:
    """The ranks that have another value than most, or where no value has most, than rank 0."""
    values = [value(facts) for facts in found]
    common = max(values, key=lambda one: (values.count(one), one == values[0]))
    return [rank for rank, one in enumerate(values) if one != common]


def problems(found: Sequence[Facts], hosts: Hosts, name: str) -> str:
    """The ranks that say `name`, and what the first of them says; "" where none does."""
    said = {rank: text for rank, facts in enumerate(found) if (text := facts.get(name))}
    return f"{named(said, hosts)}: {said[min(said)]}" if said else ""


def versions(found: Sequence[Facts], hosts: Hosts) -> Iterator[Row]:
    """Of the libraries."""
    text = ", ".join(f"{name} {version}" for name, version in found[0]["versions"].items() if version)
    for name in found[0]["versions"]:
        if odd := others(found, lambda facts, name=name: facts["versions"].get(name)):  # type: ignore[misc]
            have = found[odd[0]]["versions"].get(name)
            yield Row("versions", f"{name} {have} on {named(odd, hosts)}", f"install the same {name} on every machine")
            return
    yield Row("versions", text)


def code(found: Sequence[Facts], hosts: Hosts) -> Iterator[Row]:
    """Of this program, and the devices."""
    if odd := others(found, lambda facts: facts["code"]):
        yield Row("code", f"{named(odd, hosts)} run other source files", "let all machines run the same files")
    else:
        yield Row("code", f"{found[0]['code'][:12]}, {found[0].get('commit', '')}".rstrip(", "))
    if odd := others(found, lambda facts: facts["device"]):
        yield Row(
            "devices",
            f"{found[odd[0]]['device']} on {named(odd, hosts)}",
            "take machines of one kind: the slowest device sets the pace of all",
        )
    else:
        yield Row("devices", f"{len(found)} × {found[0]['device']}")


def flags(found: Sequence[Facts], hosts: Hosts) -> Iterator[Row]:
    """Whether each rank could prepare the run, and decided as the others did."""
    if text := problems(found, hosts, "problem"):
        yield Row("flags", text, "mend what it names")
        return
    for name in found[0]["decisions"]:
        if odd := others(found, lambda facts, name=name: facts["decisions"].get(name)):  # type: ignore[misc]
            yield Row(
                "flags",
                f"{named(odd, hosts)} have another {name}: {found[odd[0]]['decisions'].get(name)}",
                "start every rank with the same command line, and let all machines see the same files",
            )
            return
    start = f"continues iteration {found[0]['start']:,}" if found[0]["start"] else "from random weights"
    finished = ", which is finished: give a greater --train-iters" if found[0]["is_finished"] else ""
    yield Row("flags", f"{found[0]['train_iters']:,} iterations in {found[0]['precision']}, {start}{finished}")


def products(found: Sequence[Facts], hosts: Hosts) -> Iterator[Row]:
    """Of each device."""
    if text := problems(found, hosts, "product"):
        yield Row("products", text, "leave that device out: it computes wrong")
    else:
        yield Row("products", "exact on every rank")


def clocks(found: Sequence[Facts], hosts: Hosts) -> Iterator[Row]:
    """How far they are apart."""
    offsets = [facts.get("clock", 0.0) for facts in found]
    apart = max(offsets) - min(offsets)
    middle = sorted(offsets)[(len(offsets) - 1) // 2]
    if apart > CLOCKS:
        worst = max(range(len(found)), key=lambda rank: abs(offsets[rank] - middle))
        yield Row(
            "clocks",
            f"that of {named([worst], hosts)} is {abs(offsets[worst] - middle):.1f} s "
            f"{'before' if offsets[worst] > middle else 'behind'} most",
            "set its clock (chrony, ntpd)",
        )
    elif len(found) > 1:
        yield Row("clocks", f"within {max(apart, 0.001):.3f} s")


def collectives(found: Sequence[Facts], hosts: Hosts) -> Iterator[Row]:
    """A row for each group."""
    for name in dict.fromkeys(group for facts in found for group in facts.get("groups", {})):
        of_ranks = {rank: facts["groups"][name] for rank, facts in enumerate(found) if name in facts.get("groups", {})}
        wrong = [rank for rank, one in of_ranks.items() if one["wrong"]]
        if wrong:
            yield Row(
                f"{name} group",
                f"{', '.join(of_ranks[wrong[0]]['wrong'])} gave wrong values on {named(wrong, hosts)}",
                "tools/bench_collectives.py says more: a link or a device is faulty",
            )
        else:
            slowest = {op: max(one["ms"][op] for one in of_ranks.values()) for op in of_ranks[min(of_ranks)]["ms"]}
            yield Row(f"{name} group", ", ".join(f"{op} {ms:.2f} ms" for op, ms in slowest.items()))


def disk(found: Sequence[Facts], hosts: Hosts) -> Iterator[Row]:
    """The --save folder."""
    if text := problems(found, hosts, "disk_problem"):
        yield Row("save folder", text, "make it writable, or give another --save")
        return
    free = min(facts["free"] for facts in found)
    speed = [facts["bytes_per_s"] for facts in found if facts["bytes_per_s"]]
    wanted, one = found[0].get("bytes_to_come", 0), found[0].get("checkpoint_bytes", 0)
    text = f"{_size(wanted)} to come, {_size(free)} free, {min(speed) / 1e6:.0f} MB/s"
    seconds = one / len(speed) / min(speed)
    mend = f"make room, or keep fewer: --keep-last (a checkpoint has {_size(one)})" if wanted > free else ""
    if not mend and seconds > SLOW_SAVE:
        text, mend = (
            f"{text}: a save takes {seconds:,.0f} s",
            "take a faster disk, or --async-save and a greater --save-interval",
        )
    yield Row("save folder", text, mend)


def data(found: Sequence[Facts], hosts: Hosts) -> Iterator[Row]:
    """Whether all ranks read the same, and how often each sample comes."""
    if any("data" not in facts for facts in found):
        return
    if odd := others(found, lambda facts: facts["data"]):
        yield Row("data", f"{named(odd, hosts)} read other training data", "let every machine see the same files")
        return
    samples, used, batch = found[0]["samples"], found[0]["used"], found[0]["batch"]
    text = f"{samples:,} samples, of which the run takes {used:,}: each {used / max(samples, 1):.2f} times"
    if samples < batch:
        yield Row(
            "data",
            f"{samples:,} samples, fewer than a batch of {batch:,}",
            "take more text, a smaller --global-batch-size or a shorter --seq-length",
        )
    else:
        yield Row("data", text)


def memory(found: Sequence[Facts], hosts: Hosts) -> Iterator[Row]:
    """What is expected of the fullest rank, and what is there."""
    if any("memory" not in facts for facts in found):
        return
    who, _, short = problems(found, hosts, "memory_problem").partition(": ")
    text, _, ways = short.partition(": ")
    yield Row("memory", f"{who}: {text}" if short else found[0]["memory"], ways)


CHECKS: tuple[Check, ...] = (versions, code, flags, products, clocks, collectives, disk, data, memory)


def table(checks: Sequence[Row]) -> list[str]:
    """One line for each check, which line up, and below each that is not well what to mend."""
    width = max(len(row.name) for row in checks)
    lines = []
    for row in checks:
        lines.append(f"  {row.name:<{width}}  {'MEND' if row.mend else 'ok':<4}  {row.text}")
        if row.mend:
            lines.append(f"  {'':<{width}}        {row.mend}")
    return lines


def _size(count: float) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"
