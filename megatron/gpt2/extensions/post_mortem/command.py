"""What did a run die of, where, and which command continues it?

    python tools/post_mortem.py checkpoints/gpt2_345m

Reads what all ranks and launchers have left in the --save folder, and says it in about ten lines.
docs/how-to/operations.md has what each death looks like. Exit codes: 0 where the run ended well, 1 where it died, 2
where the folder is no run's.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from data_utils.command_line import Parser
from megatron.gpt2.checkpoint.folder import find_checkpoint
from megatron.gpt2.checkpoint.local import newest_held
from megatron.gpt2.config.recipes import FILE
from megatron.gpt2.extensions.post_mortem.deaths import Death, cause_of, last_attempt, own_rank, place
from megatron.gpt2.monitor.ended import ENDED
from megatron.gpt2.monitor.incidents import FOLDER, read_incidents
from megatron.gpt2.monitor.plots import read_records
from megatron.gpt2.monitor.reporting import aligned
from megatron.gpt2.monitor.run_report import HISTORY, METRICS

MOST_AFTER = 3  # incidents after the first cause that are shown
LINE = 160  # characters of each
TELLING = {"rank ended", "lost", "hang", "not finite", "replica", "error", "refused", "stop", "crash loop"}


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file; an empty one where there is none, or where a crash has cut it short."""
    try:
        value = json.loads(path.read_bytes().decode("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def report(folder: Path, *, verify: bool = False) -> tuple[Death, list[str]]:
    """The first cause, and the lines about the run that saved in `folder`. verify: hash every byte of its checkpoints.
    FileNotFoundError where it is no run's."""
    if not any((folder / name).exists() for name in (FILE, METRICS, HISTORY, FOLDER)):
        raise FileNotFoundError(f"{folder} holds nothing of a run: give its --save folder")
    incidents, settings, ended = read_incidents(folder), read_json(folder / FILE), read_json(folder / ENDED)
    history = read_records(folder / HISTORY)
    found = last_attempt(incidents)
    # A start that was refused has changed nothing of how the run ended.
    begun = next((one["time"] for one in found if one.get("kind") != "refused"), 0.0)
    clean = ended if _number(ended.get("time", begun)) >= begun else {}
    notes = [str(one.get("text", "")) for one in history if _seconds(one.get("time")) >= int(begun)]
    if not found and not clean and notes and notes[-1] == "finished":  # of a run from before there were incidents
        clean = {"exit_code": 0, "reason": "it is finished", "iteration": history[-1]["iteration"]}
    death = cause_of(incidents, clean or None, notes)
    metrics = [one["iteration"] for one in read_records(folder / METRICS) if "split" not in one]
    reached = max([*metrics[-1:], *(one["iteration"] for one in found)], default=0)
    rows = [
        (
            "run",
            f"{folder}, {'ended well' if death.well else 'died'}, after iteration {max(reached, 0):,}"
            f"{_of(settings)}{_attempts(found)}",
        ),
        ("first", death.what),
    ]
    if not death.well:
        rows += [("means", death.means), *_after(found, death), ("do", death.do)]
    rows += _going_on(folder, settings, found, reached, verify)
    return death, aligned(rows)


def _after(found: Sequence[Mapping[str, Any]], death: Death) -> list[tuple[str, str]]:
    """What the other processes noted, the earliest first."""
    telling = [one for one in found if one.get("kind") in TELLING]
    lines = [
        f"{datetime.fromtimestamp(one['time']):%H:%M:%S} {place(one)}: {one['kind']}"
        + f", {one['text'][:LINE]}" * bool(one["text"])
        for one in telling
    ]
    more = len(lines) - MOST_AFTER
    shown = lines[:MOST_AFTER] + ([f"and {more} more in {FOLDER}/"] if more > 0 else [])
    return [("noted" if number == 0 else "", line) for number, line in enumerate(shown)]


def _going_on(
    folder: Path, settings: Mapping[str, Any], found: Sequence[Mapping[str, Any]], reached: int, verify: bool
) -> list[tuple[str, str]]:
    """The checkpoint that the same command would continue, and the command."""
    warnings: list[str] = []
    try:
        checkpoint = find_checkpoint(folder, log=warnings.append, verify=verify)
    except ValueError as error:
        return [("checkpoint", f"none is valid: {error}")]
    except OSError as error:
        return [("checkpoint", f"cannot be read: {error}")]
    iteration = checkpoint.iteration if checkpoint is not None else 0
    text = f"iteration {iteration:,} is the newest valid one" if checkpoint is not None else "none was saved"
    if (near := _near(folder, settings)) > iteration:
        iteration, text = near, f"{text}, and of {near:,} this machine holds a local one"
    lost = max(0, reached - iteration)
    text += (
        f"; {lost:,} iteration{'s' * (lost != 1)} to be done again"
        if iteration and lost
        else ": the run begins anew" * (not iteration)
    )
    rows = [("checkpoint", text), *(("", line.removeprefix("WARNING: ")) for line in warnings[:1])]
    if command := _command(settings, found):
        rows += [("continue", command)]
    return rows


def _near(folder: Path, settings: Mapping[str, Any]) -> int:
    """The iteration of the newest local checkpoint of the run on this machine; 0 where there is none."""
    try:
        directory = settings["config"]["checkpoint"]["local_checkpoint_dir"]
    except (KeyError, TypeError):
        return 0
    return newest_held(str(folder), directory, alone=False) if isinstance(directory, str) else 0


def _command(settings: Mapping[str, Any], found: Sequence[Mapping[str, Any]]) -> str:
    """The command line of the last start, as rank 0 has it; a launcher before it is to be started in the same way."""
    starts = [one for one in found if one.get("kind") == "start" and own_rank(one) is not None]
    for one in starts:
        words = one.get("command", one.get("command_line"))
        if isinstance(words, list) and words:
            return shlex.join(map(str, words))
    environment = settings.get("environment")
    return str(environment.get("command", "")) if isinstance(environment, Mapping) else ""


def _of(settings: Mapping[str, Any]) -> str:
    length = settings.get("train_iters")
    return f" of {length:,}" if isinstance(length, int) else ""


def _attempts(found: Sequence[Mapping[str, Any]]) -> str:
    most = max((one["attempt"] for one in found if isinstance(one.get("attempt"), int)), default=0)
    return f", started again {most} time{'s' * (most != 1)}" if most else ""


def _number(value: Any) -> float:
    return value if isinstance(value, int | float) else 0.0


def _seconds(text: Any) -> float:
    """Seconds since 1970 of a line of history.jsonl."""
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except (ValueError, OverflowError, OSError):
        return 0.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: this process's); returns the exit code."""
    parser = Parser(prog="post_mortem", description=__doc__)
    parser.add_argument("save", metavar="RUN", help="the --save folder of a run")
    parser.add_argument("--verify", action="store_true", help="hash every byte of the checkpoints")
    options = parser.parse_args(argv)
    death, lines = report(Path(options.save), verify=options.verify)
    print("\n".join(lines))
    return 0 if death.well else 1
