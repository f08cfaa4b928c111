"""Recipes that flags override: named runs, for --model, and the config.json of a run, for --config.

Keys are "section.field". The published 345M demo is one recipe; the other sizes share it and differ only in shape. Its
decay of 320,000 iterations is left to --train-iters, so that a shorter run also anneals. `quickstart` is what a run
without a shape is. Every start of a run writes `config.json` into its save folder.
"""

import contextlib
import json
from pathlib import Path
from typing import Any

from data_utils.files import RUN_SETTINGS_VERSION, one_line, replace_text
from megatron.gpt2.config.sections import Config, differing, require

FILE = "config.json"
SHAPES = {  # layers, hidden size, heads
    "117m": (12, 768, 12),
    "345m": (24, 1024, 16),
    "774m": (36, 1280, 20),
    "1.5b": (48, 1600, 25),
    "2.5b": (54, 1920, 20),
    "4.2b": (64, 2304, 24),
    "8.3b": (72, 3072, 32),
}
# A run with one of these on its command line names a model of its own: the quickstart does not apply.
SHAPE_KEYS = ("model.num_layers", "model.hidden_size", "model.num_attention_heads")

PUBLISHED: dict[str, Any] = {
    "model.max_position_embeddings": 1024,
    "model.attention_dropout": 0.1,
    "model.hidden_dropout": 0.1,
    "data.seq_length": 1024,
    "data.split": "949,50,1",
    "data.tokenizer_type": "GPT2BPETokenizer",
    "optimizer.lr": 1.5e-4,
    "optimizer.lr_decay_style": "cosine",
    "optimizer.warmup": 0.01,
    "optimizer.weight_decay": 0.01,
    "optimizer.clip_grad": 1.0,
    "optimizer.adam_beta1": 0.9,
    "optimizer.adam_beta2": 0.999,
    "train.micro_batch_size": 8,
    "train.train_iters": 320_000,
    "train.seed": 1234,
    "train.eval_interval": 1000,
    "train.eval_iters": 100,
    "train.log_interval": 100,
    "checkpoint.save_interval": 5000,
}

PRESETS: dict[str, dict[str, Any]] = {
    name: {**dict(zip(SHAPE_KEYS, shape, strict=True)), **PUBLISHED} for name, shape in SHAPES.items()
}

# About 5 epochs of the built-in corpus, in minutes on 2 cores; with more steps the loss of held-out text rises again
# (1.71 bits per byte after 700, 1.74 after 1,000). A narrow model learns faster from larger weights than 0.02, which
# suits widths above 1,000: with 0.05 it is ahead by 180 of the first 600 steps.
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
    "optimizer.lr": 2e-3,
    "optimizer.min_lr": 1e-4,
    "optimizer.lr_decay_style": "cosine",
    "optimizer.warmup": 0.03,
    "optimizer.weight_decay": 0.1,
    "optimizer.adam_beta2": 0.95,
    "train.micro_batch_size": 8,
    "train.train_iters": 700,
    "train.eval_interval": 200,
    "train.eval_iters": 100,
    "train.log_interval": 50,
}

DEFAULT_TRAIN_ITERS = 1_000_000  # of a run that names its own shape, as in 2019


def write_config(folder: Path, config: Config, facts: dict[str, Any], *, goes_on: bool) -> None:
    """Write `config`, with `facts` about the run (JSON), into `folder`, atomically. goes_on: the run continues the
    checkpoint in `folder`; the file then keeps the --load and --finetune that it has there, with which the run began.
    Raises OSError if the disk refuses the file."""
    sections = config.as_dict()
    if goes_on:
        # If there is no file, or a damaged one, nothing is kept: only --config reads it.
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            before = json.loads((folder / FILE).read_text(encoding="utf-8"))["config"]["checkpoint"]
            sections["checkpoint"] |= {name: before[name] for name in ("load", "finetune")}
    settings = {"version": RUN_SETTINGS_VERSION, "config": sections, **facts}
    replace_text(folder / FILE, json.dumps(settings, indent=2) + "\n")


def read_config(path: str) -> dict[str, Any]:
    """The flags of the run that wrote the file `path`: "section.field" to value, for each that is not the default. The
    batch is the whole run's, for any number of ranks. Raises ValueError or FileNotFoundError, in one line, if `path` is
    not such a file."""
    try:
        settings = json.loads(Path(path).read_text(encoding="utf-8"))
        version = settings.get("version", RUN_SETTINGS_VERSION)
        require(
            version == RUN_SETTINGS_VERSION,
            f"it is of version {version}, and this program reads {RUN_SETTINGS_VERSION}",
        )
        config = Config.from_dict(settings["config"])
        batch = int(settings["global_batch_size"])
    except OSError as error:
        raise FileNotFoundError(f"--config {path}: {error.strerror}") from None
    except (KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise ValueError(
            f"--config {path} is not the {FILE} of a run: {type(error).__name__}: {one_line(error)}"
        ) from None
    except ValueError as error:
        raise ValueError(f"--config {path}: {one_line(error)}") from None
    values = differing(config) | {"train.global_batch_size": batch}  # whatever the number of ranks is now
    values.pop("train.gradient_accumulation_steps", None)
    values.pop("model.vocab_size", None)  # the tokenizer's
    if config.checkpoint.load == config.checkpoint.save:
        values.pop("checkpoint.load", None)  # a run that begins where it saves, which another --save is not
    return values
