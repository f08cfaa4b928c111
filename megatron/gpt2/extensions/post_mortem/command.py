"""What did a run die of, where, and which command continues it?

    python tools/post_mortem.py checkpoints/gpt2_345m

Reads what all ranks and launchers have left in the --save folder, and says it in about ten lines.
docs/how-to/operations.md has what each death looks like. Exit codes: 0 if the run ended well, 1 if it died, 2 if the
folder is not one of a run.
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
from megatron.gpt2.monitor.incidents import ENDED, FOLDER, read_incidents, read_records
from megatron.gpt2.monitor.reporting import aligned
from megatron.gpt2.monitor.run_report import HISTORY, METRICS

MOST_AFTER = 3  # incidents after the first cause that are shown
LINE = 160  # characters of each
TELLING = {"rank ended", "lost", "hang", "not finite", "error", "refused", "crash loop"}

Found = Sequence[Mapping[str, Any]]  # incidents of the last attempt


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file; an empty one if there is no file, or if a crash has cut it short."""
    try:
        value = json.loads(path.read_bytes().decode("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def report(folder: Path, *, verify: bool = False) -> tuple[Death, list[str]]:
    """Return the first cause, and the lines about the run that saved in `folder`. verify: hash every byte of its
    checkpoints. FileNotFoundError if the folder is not one of a run."""
    if not any((folder / name).exists() for name in (FILE, METRICS, HISTORY, FOLDER)):
        raise FileNotFoundError(f"{folder} holds nothing of a run: give its --save folder")
    incidents, settings, ended = read_incidents(folder), read_json(folder / FILE), read_json(folder / ENDED)
    found = last_attempt(incidents)
    # A start that was refused has changed nothing of how the run ended.
    begun, at = next((one["time"] for one in found if one["kind"] != "refused"), 0.0), ended.get("time")
    death = cause_of(incidents, ended if isinstance(at, int | float) and at >= begun else None)
    metrics = [one["iteration"] for one in read_records(folder / METRICS) if "split" not in one]
    reached = max([0, *metrics[-1:], *(one["iteration"] for one in found)])
    length, starts = settings.get("train_iters"), max((one.get("attempt", 0) for one in found), default=0)
    run = f"{folder}, {'ended well' if death.well else 'died'}, after iteration {reached:,}"
    run += f" of {length:,}" if isinstance(length, int) else ""
    run += f", started again {starts} time{'s' * (starts != 1)}" if starts else ""
    rows = [("run", run), ("first", death.what)]
    if not death.well:
        rows += [("means", death.means), *_noted(found), ("do", death.do)]
    return death, aligned([*rows, *_going_on(folder, settings, found, reached, verify)])


def _noted(found: Found) -> list[tuple[str, str]]:
    """What the processes noted, the earliest first."""
    lines = [
        f"{datetime.fromtimestamp(one['time']):%H:%M:%S} {place(one)}: {one['kind']}"
        + f", {one['text'][:LINE]}" * bool(one["text"])
        for one in found
        if one["kind"] in TELLING
    ]
    if len(lines) > MOST_AFTER:
        lines[MOST_AFTER:] = [f"and {len(lines) - MOST_AFTER} more in {FOLDER}/"]
    return [("" if number else "noted", line) for number, line in enumerate(lines)]


def _going_on(
    folder: Path, settings: Mapping[str, Any], found: Found, reached: int, verify: bool
) -> list[tuple[str, str]]:
    """The checkpoint that the same command would continue, and the command."""
    warnings: list[str] = []
    try:
        checkpoint = find_checkpoint(folder, log=warnings.append, verify=verify)
    except (ValueError, OSError) as error:
        return [("checkpoint", f"none is valid: {error}")]
    iteration = checkpoint.iteration if checkpoint is not None else 0
    text = f"iteration {iteration:,} is the newest valid one" if checkpoint is not None else "none was saved"
    try:
        local = settings["config"]["checkpoint"]["local_checkpoint_dir"]
    except (KeyError, TypeError):
        local = None
    if isinstance(local, str) and (near := newest_held(str(folder), local, alone=False)) > iteration:
        iteration, text = near, f"{text}, and of {near:,} this machine holds a local one"
    again = reached - iteration
    if not iteration:
        text += ": the run begins anew"
    elif again > 0:
        text += f"; {again:,} iteration{'s' * (again != 1)} to be done again"
    rows = [("checkpoint", text), *(("", line.removeprefix("WARNING: ")) for line in warnings[:1])]
    return [*rows, *(("continue", command) for command in _commands(settings, found)[:1])]


def _commands(settings: Mapping[str, Any], found: Found) -> list[str]:
    """The command line of the last start, as rank 0 has it; a launcher before it is to be started in the same way."""
    starts = [one for one in found if one["kind"] == "start" and own_rank(one) is not None]
    commands = [shlex.join(map(str, one["command"])) for one in starts if isinstance(one.get("command"), list)]
    environment = settings.get("environment")
    return commands + (
        [str(environment["command"])] if isinstance(environment, dict) and "command" in environment else []
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: this process's); returns the exit code."""
    parser = Parser(prog="post_mortem", description=__doc__)
    parser.add_argument("save", metavar="RUN", help="the --save folder of a run")
    parser.add_argument("--verify", action="store_true", help="hash every byte of the checkpoints")
    options = parser.parse_args(argv)
    death, lines = report(Path(options.save), verify=options.verify)
    print("\n".join(lines))
    return 0 if death.well else 1
