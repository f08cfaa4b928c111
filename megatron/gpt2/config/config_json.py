"""`config.json` in the save folder of a run: every start writes it, and `--config` reads it."""

import json
from pathlib import Path
from typing import Any

from data_utils.files.atomic import replace_text
from data_utils.files.checked_json import one_line
from data_utils.files.format_versions import RUN_SETTINGS_VERSION
from megatron.gpt2.config.flag_names import by_key
from megatron.gpt2.config.options import require
from megatron.gpt2.config.sections import SECTIONS, Config

FILE = "config.json"


def write_config(folder: Path, config: Config, facts: dict[str, Any], *, goes_on: bool) -> None:
    """Write `config`, and beside it `facts` about the run (JSON), into `folder`, atomically. goes_on: the run continues
    the checkpoint in `folder`; the file then keeps the --load and --finetune that it has there, with which the run
    began. Raises OSError where the disk refuses the file."""
    sections = config.as_dict()
    if goes_on:
        try:
            before = json.loads((folder / FILE).read_text(encoding="utf-8"))["config"]["checkpoint"]
            sections["checkpoint"] |= {name: before[name] for name in ("load", "finetune")}
        except (OSError, ValueError, KeyError, TypeError):
            pass  # there is none, or it is damaged: nothing but --config reads it
    settings = {"version": RUN_SETTINGS_VERSION, "config": sections, **facts}
    replace_text(folder / FILE, json.dumps(settings, indent=2) + "\n")


def read_config(path: str) -> dict[str, Any]:
    """The flags of the run that wrote the file `path`: "section.field" to value, where that is not the default. The
    batch is the whole run's, for any number of ranks. Raises ValueError or FileNotFoundError, in one line, where
    `path` is no such file."""
    try:
        settings = json.loads(Path(path).read_text(encoding="utf-8"))
        version, sections = settings.get("version", RUN_SETTINGS_VERSION), settings["config"]
        require(
            version == RUN_SETTINGS_VERSION,
            f"--config {path} is of version {version}, and this program reads {RUN_SETTINGS_VERSION}",
        )
        unknown = sections.keys() - SECTIONS.keys()
        require(not unknown, f"unknown section {', '.join(sorted(unknown))} (written by a newer version?)")
        config, default = by_key(Config.from_dict(sections).as_dict()), by_key(Config().as_dict())
        batch = int(settings["global_batch_size"])
    except OSError as error:
        raise FileNotFoundError(f"--config {path}: {error.strerror}") from None
    except (KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise ValueError(
            f"--config {path} is not the {FILE} of a run: {type(error).__name__}: {one_line(error)}"
        ) from None
    except ValueError as error:
        named = "" if str(error).startswith("--config") else f"--config {path}: "
        raise ValueError(named + one_line(error)) from None
    values = {key: value for key, value in config.items() if value != default[key]}
    values["train.global_batch_size"] = batch  # whatever the number of ranks is now
    values.pop("train.gradient_accumulation_steps", None)
    values.pop("model.vocab_size", None)  # the tokenizer's
    if values.get("checkpoint.load") == config["checkpoint.save"]:
        values.pop("checkpoint.load", None)  # a run that begins where it saves, which another --save is not
    return values
