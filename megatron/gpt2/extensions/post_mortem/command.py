"""Explain why a run failed, on which rank, and which command continues it.

    python tools/post_mortem.py checkpoints/gpt2_345m

Reads the files that all ranks and launchers left in the --save folder, and prints about ten lines.
docs/how-to/operations.md describes each failure. Exit codes: 0 if the run ended well, 1 if it failed, 2 if the folder
is not the --save folder of a run.
"""

import shlex
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from data_utils.command_line import Parser, plural
from data_utils.files import MAX_CONFIG_BYTES, read_json_object
from megatron.gpt2.checkpoint.local import newest_local_iteration
from megatron.gpt2.checkpoint.save_folder import find_checkpoint
from megatron.gpt2.config.presets import CONFIG_FILE
from megatron.gpt2.extensions.post_mortem.failure_analysis import (
    Failure,
    Incident,
    earlier_causes,
    first_cause,
    last_attempt,
    origin,
    reporting_rank,
)
from megatron.gpt2.monitor.html_report import HISTORY, METRICS
from megatron.gpt2.monitor.incidents import ENDED, FOLDER, read_incidents, read_records
from megatron.gpt2.monitor.log_lines import align_rows

MAX_NOTED = 3  # At most this number of incidents is shown.
LINE = 160  # number of characters of a line
SHOWN_KINDS = {"rank ended", "lost", "hang", "not finite", "error", "refused", "crash loop"}

Incidents = Sequence[Incident]  # the incidents of the last attempt


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, or an empty one if the file is missing or a crash has truncated it."""
    try:
        return read_json_object(path, MAX_CONFIG_BYTES)
    except (OSError, ValueError):
        return {}


def report(folder: Path, *, verify: bool = False) -> tuple[Failure, list[str]]:
    """Return the first cause and the lines to print about the run that saved in `folder`.

    verify: hash every byte of its checkpoints. Raises FileNotFoundError if it is not the folder of a run."""
    if not any((folder / name).exists() for name in (CONFIG_FILE, METRICS, HISTORY, FOLDER)):
        raise FileNotFoundError(f"{folder} is not the folder of a run: give its --save folder")
    incidents, settings, ended = read_incidents(folder), read_json(folder / CONFIG_FILE), read_json(folder / ENDED)
    found = last_attempt(incidents)
    # A refused start does not change how the run ended.
    start_time = next((incident["time"] for incident in found if incident["kind"] != "refused"), 0.0)
    end_time = ended.get("time")
    failure = first_cause(incidents, ended if isinstance(end_time, int | float) and end_time >= start_time else None)
    metrics = [incident["iteration"] for incident in read_records(folder / METRICS) if "split" not in incident]
    reached = max([0, *metrics[-1:], *(incident["iteration"] for incident in found)])
    length, starts = settings.get("train_iters"), max((incident.get("attempt", 0) for incident in found), default=0)
    run = f"{folder}, {'ended well' if failure.is_success else 'died'}, after iteration {reached:,}"
    run += f" of {length:,}" if isinstance(length, int) else ""
    run += f", started again {plural(starts, 'time')}" if starts else ""
    rows = [("run", run), ("first", failure.cause)]
    rows += [("before", cause) for cause in earlier_causes(incidents)[-MAX_NOTED:]]
    if not failure.is_success:
        rows += [("means", failure.meaning), *_noted(found), ("do", failure.remedy)]
    return failure, align_rows([*rows, *_continuation(folder, settings, found, reached, verify)])


def _noted(found: Incidents) -> list[tuple[str, str]]:
    """Return rows with the incidents, the earliest one first."""
    lines = [
        f"{datetime.fromtimestamp(incident['time']):%H:%M:%S} {origin(incident)}: {incident['kind']}"
        + f", {incident['text'][:LINE]}" * bool(incident["text"])
        for incident in found
        if incident["kind"] in SHOWN_KINDS
    ]
    if len(lines) > MAX_NOTED:
        lines[MAX_NOTED:] = [f"and {len(lines) - MAX_NOTED} more in {FOLDER}/"]
    return [("" if number else "noted", line) for number, line in enumerate(lines)]


def _continuation(
    folder: Path, settings: Mapping[str, Any], found: Incidents, reached: int, verify: bool
) -> list[tuple[str, str]]:
    """Return rows with the checkpoint that the same command would load, and the command."""
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
    if isinstance(local, str) and (near := newest_local_iteration(str(folder), local, one_machine=False)) > iteration:
        iteration, text = near, f"{text}, and this machine has a local one of iteration {near:,}"
    again = reached - iteration
    if not iteration:
        text += ": the run starts from the beginning"
    elif again > 0:
        text += f"; {plural(again, 'iteration')} will be repeated"
    rows = [("checkpoint", text), *(("", line.removeprefix("WARNING: ")) for line in warnings[:1])]
    return [*rows, *(("continue", command) for command in _commands(settings, found)[:1])]


def _commands(settings: Mapping[str, Any], found: Incidents) -> list[str]:
    """Return the command lines of the last start, rank 0's first. The lines do not include an external launcher."""
    starts = [incident for incident in found if incident["kind"] == "start" and reporting_rank(incident) is not None]
    commands = [
        shlex.join(map(str, incident["command"])) for incident in starts if isinstance(incident.get("command"), list)
    ]
    environment = settings.get("environment")
    return commands + (
        [str(environment["command"])] if isinstance(environment, dict) and "command" in environment else []
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: this process's). Return the exit code."""
    parser = Parser(prog="post_mortem", description=__doc__)
    parser.add_argument("save", metavar="RUN", help="the --save folder of a run")
    parser.add_argument("--verify", action="store_true", help="hash every byte of the checkpoints")
    options = parser.parse_args(argv)
    failure, lines = report(Path(options.save), verify=options.verify)
    print("\n".join(lines))
    return 0 if failure.is_success else 1
