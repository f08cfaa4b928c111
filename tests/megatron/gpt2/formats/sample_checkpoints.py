"""Checkpoints of other programs: functions that write them from random weights, and the files that megatron-core wrote
in `torch_dist/`. Helpers compute the logits of a checkpoint and its next learning rate."""

from __future__ import annotations

import argparse
import functools
import json
import tarfile
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

import mpu
from megatron.gpt2.checkpoint.interface import TensorInfo
from megatron.gpt2.checkpoint.sharded_state import load_sharded_state_dict, parameter_states
from megatron.gpt2.config import ModelConfig, OptimizerConfig
from megatron.gpt2.formats import BaseCheckpoint, Hints, open_checkpoint
from megatron.gpt2.formats.megatron import flatten_state_dict
from megatron.gpt2.formats.megatron import write_megatron as export_megatron
from megatron.gpt2.formats.megatron_model import FUSED, MegatronLayout, native_name
from megatron.gpt2.formats.nanogpt_and_dcp import openai_name, to_openai
from megatron.gpt2.model.gpt2 import GPT2Model, model_partition_specs
from megatron.gpt2.optimizer.optimizer import learning_rates
from mpu.partition import TensorSlice
from tests.conftest import error_line

SHAPE = ModelConfig(
    num_layers=4, hidden_size=48, num_attention_heads=4, ffn_hidden_size=80, vocab_size=101, max_position_embeddings=24
)
PADDED = 128  # rows of the padded vocabulary on each rank
KINDS = ("model", "master", "exp_avg", "exp_avg_sq")
TOLERANCE = 5e-6  # the tolerance of a logit
RANK_FILE = "model_optim_rng.pt"


def random_weights(shape: ModelConfig = SHAPE, seed: int = 0) -> dict[str, Tensor]:
    """Return random weights by our names. No value is zero or one, so that a missing tensor changes the logits."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: 0.2 * torch.randn(spec.global_shape, generator=generator) + ("layernorm.weight" in name)
        for name, spec in model_partition_specs(shape).items()
    }


# --- Megatron's files


# The export format from which `write_megatron` makes the files of a form. "v1" is the form of Megatron v1.0 and v2.0,
# "v2" that of v2.6, and "fused" that of Megatron Core with Transformer Engine.
FORMATS = {
    "flat": "megatron-2019",
    "v1": "megatron-v2",
    "v2": "megatron-v3",
    "core": "megatron-core",
    "fused": "megatron-core",
}


def write_megatron(
    folder: Path,
    weights: dict[str, Tensor],
    form: str,
    *,
    version: int = 0,
    tp: int = 1,
    pp: int = 1,
    legacy: bool = False,
    with_args: bool = True,
) -> Path:
    """Write a --save folder with iteration 7, and return the first file. The function exports the weights and changes
    the files: QKV rows get the order of `version`, and entries that Megatron does not write are removed.

    with_args: whether to write Megatron's arguments.
    """
    source = InMemoryCheckpoint({f"model.{name}": x for name, x in weights.items()}, iteration=7)
    made = export_megatron(source, folder, FORMATS[form], MegatronLayout(tp, pp), log=silent)
    files = sorted(made.glob(f"*/{RANK_FILE}"))
    for file in files:
        model = torch.load(file, weights_only=False)["model"]
        for name, x in flatten_state_dict(model).items():
            if ".query_key_value." in name and form == "v1" and version < 2:
                split = x.view(SHAPE.num_attention_heads // tp, 3, -1, *x.shape[1:])  # [n/tp, 3, d, ...]
                split = split.transpose(0, 1) if version == 0 else split.transpose(1, 2)
                x.copy_(split.reshape(x.shape))
            if form == "fused":
                del model[name]
                model[functools.reduce(lambda name, pair: name.replace(*pair), FUSED.items(), name)] = x
                model["decoder.layers.0.self_attention.linear_qkv._extra_state"] = None
        saved: dict[str, Any] = {"iteration": 7, "model": model}
        if version:
            saved["checkpoint_version"] = float(version)
        if with_args:
            saved["args"] = argparse.Namespace(
                num_layers=SHAPE.num_layers,
                hidden_size=SHAPE.hidden_size,
                num_attention_heads=SHAPE.num_attention_heads,
                padded_vocab_size=PADDED * tp,
                tensor_model_parallel_size=tp,
                pipeline_model_parallel_size=pp,
                openai_gelu=False,
                bias_gelu_fusion=True,
            )
        torch.save(saved, file, _use_new_zipfile_serialization=not legacy)
    return files[0]


def changed(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Apply `change` to the dictionary in the file `path`."""
    top = torch.load(path, weights_only=False)
    change(top)
    torch.save(top, path)


# --- files with OpenAI's names


def openai_state(weights: dict[str, Tensor], *, transposed: bool) -> dict[str, Tensor]:
    """Convert our `weights` to OpenAI's names and layout. In test_openai.py, transformers' model loads the result and
    computes equal logits."""
    return {
        f"transformer.{openai_name(name)}": to_openai(
            value, name, SHAPE.num_attention_heads, transposed=transposed
        ).contiguous()
        for name, value in weights.items()
    }


def write_huggingface(folder: Path, **config: Any) -> Path:
    """Write Hugging Face's files without transformers, so that `config` can have errors."""
    folder.mkdir(exist_ok=True)
    save_file(openai_state(random_weights(), transposed=True), folder / "model.safetensors", metadata={"format": "pt"})
    sizes = {"vocab_size": 101, "n_positions": 24, "n_embd": 48, "n_layer": 4, "n_head": 4, "n_inner": 80}
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", **sizes, **config}))
    return folder


def nanogpt_checkpoint(
    *, bias: bool = True, prefix: str = "_orig_mod.", vocab_size: int = 101
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return a checkpoint as nanoGPT's train.py writes it, and its weights by our names."""
    weights = random_weights(replace(SHAPE, ffn_hidden_size=None, vocab_size=vocab_size), seed=3)
    vectors = [name for name in weights if name.endswith(".bias")] if not bias else []
    state = openai_state({name: x for name, x in weights.items() if name not in vectors}, transposed=False)
    weights |= {name: torch.zeros_like(weights[name]) for name in vectors}
    order = sorted(state, key=lambda name: state[name].dim() == 1)
    matrices = sum(value.dim() == 2 for value in state.values())
    same = {"betas": (0.9, 0.95), "eps": 1e-8, "lr": 1e-3}
    adam = {
        "state": {
            number: {"step": torch.tensor(9.0), "exp_avg": state[name] + 1, "exp_avg_sq": state[name] ** 2}
            for number, name in enumerate(order)
        },
        "param_groups": [
            {"params": list(range(matrices)), "weight_decay": 0.1, **same},
            {"params": list(range(matrices, len(order))), "weight_decay": 0.0, **same},
        ],
    }
    state["lm_head.weight"] = state["transformer.wte.weight"]
    sizes = {"n_layer": 4, "n_head": 4, "n_embd": 48, "block_size": 24, "vocab_size": vocab_size}
    return {
        "model": {prefix + name: value for name, value in state.items()},
        "optimizer": adam,
        "model_args": {**sizes, "bias": bias, "dropout": 0.2},
        "iter_num": 9,
        "best_val_loss": torch.tensor(1.0),
        "config": {"out_dir": "out"},
    }, weights


# --- sources in memory


class InMemoryCheckpoint(BaseCheckpoint):
    """A checkpoint in memory.

    tensors: the tensors by names such as "model.word_embeddings.weight".
    """

    def __init__(
        self, tensors: dict[str, Tensor], shape: ModelConfig = SHAPE, metadata: Any = None, iteration: int = 0
    ) -> None:
        metadata = metadata or {}
        self.path, self.format, self.iteration, self._held = Path("made"), "native", iteration, tensors
        self.tensors = {name: TensorInfo(x.dtype, tuple(x.shape)) for name, x in tensors.items()}
        config = {**metadata.get("config", {}), "model": asdict(shape)}
        self.metadata = {**metadata, "config": config, "vocab_size": shape.vocab_size, "iteration": iteration}

    def read_into(self, out: Tensor, name: str, offset: tuple[int, ...]) -> None:
        out.copy_(self._held[name][TensorSlice(offset, tuple(out.shape)).slices()])


def in_memory_checkpoint(num_layers: int, dtype: torch.dtype) -> BaseCheckpoint:
    """Return the state of a run: weights of `dtype`, masters, moments and their metadata."""
    shape = ModelConfig(
        num_layers=num_layers,
        hidden_size=16,
        num_attention_heads=4,
        vocab_size=101,
        max_position_embeddings=8,
        make_vocab_size_divisible_by=8,
    )
    tensors = {}
    for name, x in random_weights(shape).items():
        weight = x.to(dtype)
        for kind, value in zip(KINDS, (weight, weight.float(), x + 1, x**2), strict=True):
            tensors[f"{kind}.{name}"] = value
    scaler = {"scale": 8.0, "clean_steps": 5.0, "hysteresis_left": 1.0} if dtype == torch.float16 else {"scale": 1.0}
    schedule = {"lr": 0.2, "min_lr": 0.1, "lr_decay_style": "cosine", "lr_decay_iters": 100, "lr_warmup_fraction": 0.1}
    metadata = {
        "consumed_samples": 24,
        "global_batch_size": 4,
        "train_iters": 100,
        "optimizer": {"num_updates": 6, "skipped_steps": 1, "adam_steps": 6, "loss_scaler": scaler},
        "config": {"optimizer": {**schedule, "weight_decay": 0.1}, "train": {"micro_batch_size": 2, "seed": 7}},
    }
    return InMemoryCheckpoint(tensors, shape, metadata, 7)


# --- checkpoints of megatron-core

FIXTURES = Path(__file__).parent / "torch_dist"
VOCABULARY = 29


def cases(archive: Path) -> list[str]:
    """Return the names of the checkpoints in an archive, which are its top folders."""
    with tarfile.open(archive) as members:
        return sorted({name.split("/")[0] for name in members.getnames()})


def unpack(archive: Path, case: str, folder: Path) -> Path:
    """Unpack one checkpoint of an archive into `folder`."""

    def select(member: tarfile.TarInfo, path: str) -> tarfile.TarInfo | None:
        top, _, name = member.name.partition("/")
        return tarfile.data_filter(member.replace(name=name), path) if top == case else None

    with tarfile.open(archive) as members:
        members.extractall(folder, filter=select)
    return folder


ARCHIVE = FIXTURES / "checkpoints.tar.xz"
CASES = cases(ARCHIVE)


def opened(folder: Path) -> BaseCheckpoint:
    return open_checkpoint(folder, Hints(vocab_size=VOCABULARY), log=silent)


def expected(kind: str) -> dict[str, Tensor]:
    """Return the tensors that megatron-core had in memory during the save, by our names."""
    with np.load(FIXTURES / "expected.npz") as held:
        names = [name for name in held.files if name.startswith(f"{kind}.")]
        return {native_name(name.removeprefix(f"{kind}.")): torch.from_numpy(held[name]) for name in names}


# --- helpers that open a checkpoint and compute with it


def silent(line: str) -> None:
    pass


def assert_refused(path: Path, *words: str, **hints: Any) -> None:
    """Check that opening `path` raises a ValueError in one line that names the path and contains the `words`."""
    message = error_line(lambda: open_checkpoint(path, Hints(**hints), log=silent))
    assert all(word in message for word in (str(path), *words)), message


def same(source: BaseCheckpoint, weights: dict[str, Tensor], kind: str = "model") -> bool:
    """Return True if the tensors of a kind are equal to `weights`."""
    return all(torch.equal(source.read(f"{kind}.{name}"), value) for name, value in weights.items())


def build_model(source: BaseCheckpoint) -> GPT2Model:
    """Return the model in fp32, on this rank of the default model-parallel group."""
    model = GPT2Model(ModelConfig(**source.metadata["config"]["model"])).eval()
    rank, size = mpu.get_model_parallel_rank(), mpu.get_model_parallel_world_size()
    weights = parameter_states(model.named_parameters())
    load_sharded_state_dict(weights, mpu.partition_specs(model), source, tp_rank=rank, tp_size=size)
    return model


@torch.no_grad()
def compute_logits(source: BaseCheckpoint, tokens: Tensor) -> Tensor:
    """Return the logits [b, s, true vocabulary]."""
    logits = mpu.gather_from_model_parallel_region(build_model(source)(tokens))  # [s, b, padded vocabulary]
    return logits[..., : source.metadata["vocab_size"]].transpose(0, 1)


def next_learning_rate(source: BaseCheckpoint) -> float:
    """Return the learning rate of the next step, in a run of 100 steps."""
    config = OptimizerConfig(**source.metadata["config"]["optimizer"])
    return float(learning_rates(config, 100, 1, np.arange(101.0))[source.metadata["optimizer"]["num_updates"]])
