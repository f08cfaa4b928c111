"""A GPT-2 in a plain folder of DCP, read and written: what `torch.distributed.checkpoint.save` writes of a model that
FSDP shards, with or without AdamW's state, under Hugging Face's or nanoGPT's names.

The folder says nothing of heads and formula. Hugging Face keeps its linear layers [in, out], nanoGPT [out, in]. Written
is what {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, adamw)} asks for, under
Hugging Face's names. `model` is a GPT2LMHeadModel, sharded or not, and `adamw` has two groups: matrices, which decay, and
vectors.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.gpt2.checkpoint.source import Source, check_facts
from megatron.gpt2.config import ModelConfig, require
from megatron.gpt2.formats.dcp import DcpFolder, save_folder
from megatron.gpt2.formats.foreign import (
    DAMAGE,
    ForeignSource,
    Hints,
    LazyTensor,
    Tensors,
    adam_flags,
    has_optimizer,
    heads_of,
    on_disk,
    progress,
)
from megatron.gpt2.formats.native import new_folder
from megatron.gpt2.formats.openai_names import (
    HEAD,
    WTE,
    adamw_groups,
    count_layers,
    exported_kind,
    openai_name,
    openai_tensor,
    openai_tensors,
    true_vocabulary,
    weights_of,
)
from megatron.gpt2.model.gpt2 import parameter_specs
from megatron.gpt2.optimizer.optimizer import MOMENTS

STATE = re.compile(r"(?:.+\.)?optim(?:izer)?\.state\.(.+)\.(exp_avg|exp_avg_sq|step)", re.ASCII)
NUMBER = re.compile(r"(?:.+\.)?optim(?:izer)?\.param_groups\.\d+\.(weight_decay|betas|eps)", re.ASCII)
WRAPPERS = re.compile(r"(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.", re.ASCII)
# What the names of other architectures look like.
OTHERS = (
    (r"self_attn\.q_proj|attention\.wq\.|attn\.wq\.", "Llama or one of its kin"),
    (r"gpt_neox\.", "GPT-NeoX"),
    (r"decoder\.layers\.self_attention|\.linear_qkv\.", "Megatron Core's, without its metadata.json"),
    (r"encoder\.layer\.|bert\.", "BERT"),
    (r"(encoder|decoder)\.block\.", "T5"),
    (r"word_embeddings\.", "BLOOM"),
)
States = Mapping[str, re.Match[str]]


def open_dcp(path: Path, hints: Hints, *, log: Callable[[str], None]) -> ForeignSource:
    """The model in the folder `path`. ValueError, one line, for anything that is not right, and for another
    architecture by its name."""
    folder = DcpFolder(path)
    states = {name: match for name in folder.tensors if (match := STATE.fullmatch(name))}
    names = [name for name in folder.tensors if name not in states]
    prefix = _prefix(names)
    head = prefix.removesuffix("transformer.") + HEAD
    mine = {name: HEAD if name == head else WRAPPERS.sub("", name.removeprefix(prefix)) for name in names}
    others = [name for name in names if not name.startswith(prefix) and name != head]
    found, _ = weights_of({mine[name]: folder.lazy(name) for name in names if name not in others})
    model, transposed = _model(found, hints, log)
    biases = "ln_f.bias" in found
    lazy = openai_tensors(model, found, transposed=transposed, biases=biases)
    left_out = [f"{len(others)} other tensors, {name[:80]} among them" for name in others[:1]]
    facts, iteration = {}, 0
    if states:
        try:
            held, steps = _adam(folder, states, found)
            adam: dict[str, LazyTensor] = {}
            for kind, tensors in held.items():
                adam |= openai_tensors(model, tensors, transposed=transposed, biases=biases, kind=kind)
            facts = {"optimizer": progress(steps), "config": {"optimizer": _flags(folder)}}
            lazy, iteration = lazy | adam, steps
        except DAMAGE as error:
            left_out.append(f"the optimizer's state ({type(error).__name__}: {str(error)[:200]})")
    return ForeignSource(path, "dcp", iteration, model, facts, lazy, left_out)


def _prefix(names: list[str]) -> str:
    """What stands before OpenAI's names. ValueError if the tensors are not a GPT-2's."""
    tables = [name for name in names if re.fullmatch(rf"(.+\.)?{re.escape(WTE)}", name)]
    if len(tables) != 1:
        for pattern, whose in OTHERS:
            if name := next((name for name in names if re.search(pattern, name)), None):
                raise ValueError(f"holds {name[:120]}, a name of {whose}, and this program knows GPT-2")
        some = f"holds {names[0][:120]}" if names else "holds no tensor"
        raise ValueError(f"is no GPT-2: {some}, and {len(tables)} tensors whose name ends in {WTE}")
    return tables[0].removesuffix(WTE)


def _model(found: Tensors, hints: Hints, log: Callable[[str], None]) -> tuple[ModelConfig, bool]:
    """The shape, and whether the linear layers are [in, out]."""

    def shape(name: str) -> tuple[int, ...]:
        if name not in found or len(found[name].info.shape) != 2:
            raise ValueError(f"holds no matrix {name}: is it no GPT-2?")
        return found[name].info.shape

    (rows, h), (positions, _) = shape(WTE), shape("wpe.weight")
    transposed = shape("h.0.attn.c_attn.weight") == (h, 3 * h)
    ffn = shape("h.0.mlp.c_fc.weight")[transposed]
    return ModelConfig(
        num_layers=count_layers(found),
        hidden_size=h,
        num_attention_heads=heads_of(h, 1, None, hints),
        ffn_hidden_size=None if ffn == 4 * h else ffn,
        max_position_embeddings=positions,
        vocab_size=true_vocabulary(rows, hints, log),
        gelu=hints.gelu or ("tanh" if transposed else "erf"),
    ), transposed


def _adam(folder: DcpFolder, states: States, found: Tensors) -> tuple[dict[str, dict[str, LazyTensor]], int]:
    """Masters and moments under OpenAI's names, and Adam's steps."""
    held: dict[str, dict[str, LazyTensor]] = {"master": dict(found), **{moment: {} for moment in MOMENTS}}
    steps = set()
    prefix = next(match[1] for match in states.values() if match[1].endswith(WTE)).removesuffix(WTE)
    for name, match in states.items():
        if match[2] == "step":
            steps.add(int(folder.read(name)))
        elif match[1] != prefix.removesuffix("transformer.") + HEAD:  # tied: a copy of the table's
            held[match[2]][WRAPPERS.sub("", match[1].removeprefix(prefix))] = folder.lazy(name)
    wanted = {name: tensor.info for name, tensor in found.items()}
    for tensors in held.values():
        require(
            {name: tensor.info for name, tensor in tensors.items()} == wanted
            and all(info.dtype == torch.float32 for info in wanted.values()),
            "its names, shapes or types are not those of the parameters, in fp32",
        )
    (step,) = steps
    return held, step


def _flags(folder: DcpFolder) -> dict[str, Any]:
    """AdamW's numbers, as our flags; none if the folder does not hold them."""
    said: dict[str, list[Any]] = {"weight_decay": [], "betas": [], "eps": []}
    for name in folder.objects:
        if number := NUMBER.fullmatch(name):
            said[number[1]].append(folder.object(name))
    if not all(said.values()):
        return {}
    return adam_flags({name: values[0] for name, values in said.items()}, said["weight_decay"])


def write_dcp(source: Source, out: str | Path) -> Path:
    """Write `source` into the new folder `out`; returns the folder. The weights are the fp32 masters if the source
    holds them, and AdamW's state stands beside them. One tensor at a time is in memory."""
    model, kind = check_facts(source), exported_kind(source, "fp32")
    specs = parameter_specs(model)
    names = {name: f"transformer.{openai_name(name)}" for name in specs}
    with new_folder(out) as folder:

        def held(kind: str, name: str) -> Tensor:
            x = openai_tensor(source, model, kind, name, transposed=True)
            return on_disk(folder, [x]).view(x.shape)

        state: dict[str, Any] = {f"model.{theirs}": held(kind, name) for name, theirs in names.items()}
        state[f"model.{HEAD}"] = state[f"model.transformer.{WTE}"]
        if has_optimizer(source):
            step = torch.tensor(float(source.facts["optimizer"]["adam_steps"]))
            for name, theirs in names.items():
                state |= {f"optimizer.state.{theirs}.{moment}": held(moment, name) for moment in MOMENTS}
                state[f"optimizer.state.{theirs}.step"] = step
            for number, group in enumerate(adamw_groups(source)):
                group["params"] = [
                    theirs for name, theirs in names.items() if (len(specs[name].global_shape) == 1) == number
                ]
                state |= {f"optimizer.param_groups.{number}.{key}": value for key, value in group.items()}
        save_folder(folder, state)
    return Path(out)
