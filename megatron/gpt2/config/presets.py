"""The presets of --model, and the file config.json, which every run writes into its --save folder and --config reads.

The keys of a preset are "section.field", and flags override its values. All presets except `quickstart` differ only in
shape and have the values of Megatron's published 345M example. The learning rate decays over --train-iters, also in a
run that is shorter than the 320,000 iterations of the example. `quickstart` is the preset of a run without a shape.
"""

import contextlib
import json
from pathlib import Path
from typing import Any

from data_utils.command_line import require
from data_utils.files import MAX_CONFIG_BYTES, atomic_write_text, one_line, read_json_object
from megatron.gpt2.config.sections import Config, non_default_values

CONFIG_FILE = "config.json"
RUN_SETTINGS_VERSION = 1
SHAPES = {  # {preset: (number of layers, hidden size, number of heads)}
    "117m": (12, 768, 12),
    "345m": (24, 1024, 16),
    "774m": (36, 1280, 20),
    "1.5b": (48, 1600, 25),
    "2.5b": (54, 1920, 20),
    "4.2b": (64, 2304, 24),
    "8.3b": (72, 3072, 32),
}
# If the command line has one of the shape flags, the preset `quickstart` is not used.
SHAPE_KEYS = ("model.num_layers", "model.hidden_size", "model.num_attention_heads")

# The flags of Megatron's 345M example whose values differ from the defaults here
PUBLISHED: dict[str, Any] = {
    "model.max_position_embeddings": 1024,
    "data.seq_length": 1024,
    "data.split": "949,50,1",
    "data.tokenizer_type": "GPT2BPETokenizer",
    "optimizer.lr": 1.5e-4,
    "optimizer.lr_decay_style": "cosine",
    "train.micro_batch_size": 8,
    "train.train_iters": 320_000,
}

PRESETS: dict[str, dict[str, Any]] = {
    name: {**dict(zip(SHAPE_KEYS, shape, strict=True)), **PUBLISHED} for name, shape in SHAPES.items()
}

# The quickstart trains for about one epoch of the built-in corpus, which takes minutes on two cores. With Muon and
# these values the model ends at 1.69 bits per byte of held-out text (bf16), with 420 steps of 8 samples at 1.70.
# With AdamW and its best values (lr 8e-4, 1,400 steps of 4 samples) it ends at 1.79 after 1.6 times the time. A model
# as narrow as this one learns faster from initial weights of 0.05 than of 0.02.
PRESETS["quickstart"] = {
    "model.num_layers": 4,
    "model.hidden_size": 256,
    "model.num_attention_heads": 4,
    "model.max_position_embeddings": 256,
    "model.attention_dropout": 0.0,
    "model.hidden_dropout": 0.0,
    "model.init_method_std": 0.05,
    "data.seq_length": 256,
    "data.split": "90,5,5",
    "optimizer.optimizer": "muon",
    "optimizer.lr": 8e-3,
    "optimizer.min_lr": 4e-4,
    "optimizer.lr_decay_style": "cosine",
    "optimizer.lr_warmup_fraction": 0.03,
    "optimizer.weight_decay": 0.1,
    "optimizer.adam_beta2": 0.95,
    "train.micro_batch_size": 16,
    "train.train_iters": 240,
    "train.eval_interval": 60,
    "train.eval_iters": 25,
    "train.log_interval": 20,
}
# With AdamW instead of Muon, the quickstart uses these values.
ADAM_QUICKSTART: dict[str, Any] = {"optimizer.optimizer": "adam", "optimizer.lr": 8e-4, "optimizer.min_lr": 4e-5}

DEFAULT_TRAIN_ITERS = 1_000_000  # the number of steps without --model, as in Megatron's release of 2019


def write_config(folder: Path, config: Config, metadata: dict[str, Any], *, continues: bool) -> None:
    """Write config.json with `config` and `metadata` (JSON values) into `folder`, atomically. Raises OSError if the
    file cannot be written.

    continues: whether the run continues the checkpoint in `folder`. The new file then has the --load and --finetune of
        the old file, with which the run began."""
    sections = config.as_dict()
    if continues:
        # A damaged config.json is replaced without an error, because a run does not need the old file.
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            before = read_json_object(folder / CONFIG_FILE, MAX_CONFIG_BYTES)["config"]["checkpoint"]
            sections["checkpoint"] |= {name: before[name] for name in ("load", "finetune")}
    settings = {"version": RUN_SETTINGS_VERSION, "config": sections, **metadata}
    atomic_write_text(folder / CONFIG_FILE, json.dumps(settings, indent=2) + "\n")


def read_config(path: str) -> dict[str, Any]:
    """Return {"section.field": value} of the config.json at `path`, without default values. Raises ValueError or
    FileNotFoundError in one line if `path` is not the config.json of a run.

    The result has the global batch size instead of --gradient-accumulation-steps, whose value depends on the number of
    ranks."""
    try:
        settings = json.loads(Path(path).read_text(encoding="utf-8"))
        version = settings.get("version", RUN_SETTINGS_VERSION)
        require(
            version == RUN_SETTINGS_VERSION,
            f"it has version {version}, and this program reads version {RUN_SETTINGS_VERSION}",
        )
        config = Config.from_dict(settings["config"])
        batch = int(settings["global_batch_size"])
    except OSError as error:
        raise FileNotFoundError(f"--config {path}: {error.strerror}") from None
    except (KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise ValueError(
            f"--config {path} is not the {CONFIG_FILE} of a run: {type(error).__name__}: {one_line(error)}"
        ) from None
    except ValueError as error:
        raise ValueError(f"--config {path}: {one_line(error)}") from None
    values = non_default_values(config) | {"train.global_batch_size": batch}
    values.pop("train.gradient_accumulation_steps", None)
    values.pop("model.vocab_size", None)  # The vocabulary size is read from the tokenizer.
    if config.checkpoint.load == config.checkpoint.save:
        values.pop("checkpoint.load", None)  # The new run may save into a different folder.
    return values
