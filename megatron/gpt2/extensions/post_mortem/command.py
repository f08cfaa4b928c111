"""Explain why and on which rank a run failed, and which command continues the run.

    python tools/post_mortem.py checkpoints/gpt2_345m

The program reads the files that all ranks and launchers left in the --save folder, and prints about ten lines.
docs/how-to/operations.md describes each failure. Exit codes: 0 if the run ended well, 1 if it failed, 2 if the folder
is not the --save folder of a run.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from data_utils.command_line import Parser, plural
from data_utils.files import MAX_CONFIG_BYTES, read_json_object
from megatron.gpt2.checkpoint.local import newest_local_iteration
from megatron.gpt2.checkpoint.save_folder import find_checkpoint
from megatron.gpt2.config.presets import CONFIG_FILE
from megatron.gpt2.extensions.post_mortem.failure_analysis import (
    KINDS,
    Failure,
    earlier_causes,
    first_cause,
    last_attempt,
)
from megatron.gpt2.monitor.html_report import HISTORY, METRICS
from megatron.gpt2.monitor.incidents import ENDED, FOLDER, read_incidents, read_records
from megatron.gpt2.monitor.log_lines import align_rows

MAX_EARLIER = 3  # the largest number of earlier causes to print


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, or an empty object if the file is missing or truncated by a crash."""
    try:
        return read_json_object(path, MAX_CONFIG_BYTES)
    except (OSError, ValueError):
        return {}


def report(folder: Path, *, verify: bool = False) -> tuple[Failure, list[str]]:
    """Return the first cause and the lines to print about the run that saved in `folder`.

    verify: hash every byte of the checkpoints. Raises FileNotFoundError if `folder` is not the folder of a run."""
    if not any((folder / name).exists() for name in (CONFIG_FILE, METRICS, HISTORY, FOLDER)):
        raise FileNotFoundError(f"{folder} is not the folder of a run: give its --save folder")
    incidents, settings, ended = read_incidents(folder), read_json(folder / CONFIG_FILE), read_json(folder / ENDED)
    found = last_attempt(incidents)
    # A refused start does not change how the run ended.
    start_time = next((incident["time"] for incident in found if incident["kind"] != "refused"), 0.0)
    failure = first_cause(incidents, ended if ended.get("time", -1.0) >= start_time else {})
    metrics = [record["iteration"] for record in read_records(folder / METRICS) if "split" not in record]
    reached = max([0, *metrics[-1:], *(incident["iteration"] for incident in found)])
    length, starts = settings.get("train_iters"), max((incident["attempt"] for incident in found), default=0)
    run = f"{folder}, {'ended well' if failure.is_success else 'died'}, after iteration {reached:,}"
    run += f" of {length:,}" if length else ""
    run += f", started again {plural(starts, 'time')}" if starts else ""
    rows = [("run", run), ("first", failure.cause)]
    rows += [("before", cause) for cause in earlier_causes(incidents)[-MAX_EARLIER:]]
    if not failure.is_success:
        rows += zip(("means", "do"), KINDS[failure.kind], strict=True)
    return failure, align_rows([*rows, *_continuation(folder, settings, reached, verify)])


def _continuation(folder: Path, settings: Mapping[str, Any], reached: int, verify: bool) -> list[tuple[str, str]]:
    """Return table rows: the checkpoint that the run's command would load, and the command."""
    warnings: list[str] = []
    try:
        checkpoint = find_checkpoint(folder, log=warnings.append, verify=verify)
    except (ValueError, OSError) as error:
        return [("checkpoint", f"none is valid: {error}")]
    iteration, text = 0, "none was saved"
    if checkpoint is not None:
        iteration, text = checkpoint.iteration, f"iteration {checkpoint.iteration:,} is the newest valid one"
    local = settings.get("config", {}).get("checkpoint", {}).get("local_checkpoint_dir")
    if local and (near := newest_local_iteration(str(folder), local, one_machine=False)) > iteration:
        iteration, text = near, f"{text}, and this machine has a local one of iteration {near:,}"
    again = reached - iteration
    if not iteration:
        text += ": the run starts from the beginning"
    elif again > 0:
        text += f"; {plural(again, 'iteration')} will be repeated"
    rows = [("checkpoint", text), *(("", line.removeprefix("WARNING: ")) for line in warnings[:1])]
    # The recorded command does not include an external launcher such as torchrun.
    return [*rows, ("continue", settings.get("environment", {}).get("command", "the same command"))]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: sys.argv[1:]). Return the exit code."""
    parser = Parser(prog="post_mortem", description=__doc__)
    parser.add_argument("save", metavar="RUN", help="the --save folder of a run")
    parser.add_argument("--verify", action="store_true", help="hash every byte of the checkpoints")
    options = parser.parse_args(argv)
    failure, lines = report(Path(options.save), verify=options.verify)
    print("\n".join(lines))
    return 0 if failure.is_success else 1
