"""A GPT-2 in a plain folder of DCP, under Hugging Face's or nanoGPT's names: what `torch.distributed.checkpoint.save`
writes of a model that FSDP shards, with or without AdamW's state.

The folder says nothing of heads and formula. Hugging Face keeps its linear layers [in, out], nanoGPT [out, in].
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from megatron.gpt2.config import ModelConfig, OptimizerConfig, require
from megatron.gpt2.formats.dcp import DcpFolder
from megatron.gpt2.formats.foreign import ForeignSource, Hints, LazyTensor
from megatron.gpt2.formats.huggingface import BUFFERS
from megatron.gpt2.formats.megatron_model import heads_of
from megatron.gpt2.formats.openai_names import check_layers, openai_tensors, true_vocabulary

TABLE, HEAD = "wte.weight", "lm_head.weight"
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


def open_dcp(path: Path, hints: Hints, *, log: Callable[[str], None]) -> ForeignSource:
    """The model in the folder `path`. ValueError, one line, for anything that is not right, and for another
    architecture by its name."""
    folder = DcpFolder(path)
    states = {name: match for name in folder.tensors if (match := STATE.fullmatch(name))}
    prefix = _prefix(path, [name for name in folder.tensors if name not in states])
    base = prefix.removesuffix("transformer.")
    found, others = {}, []
    for name in folder.tensors:
        short = WRAPPERS.sub("", name.removeprefix(prefix))
        if name in states or (name.startswith(prefix) and BUFFERS.fullmatch(short)):
            continue
        if name == base + HEAD or name.startswith(prefix):
            found[HEAD if name == base + HEAD else short] = folder.lazy(name)
        else:
            others.append(name)
    head, table = found.pop(HEAD, None), found[TABLE]
    if head is not None and not (head.info == table.info and torch.equal(head.make(), table.make())):
        raise ValueError(f"{path}: {HEAD} is not {TABLE}, and the head of this program's GPT-2 is tied")
    model, transposed = _model(path, found, hints, log)
    biases = "ln_f.bias" in found
    lazy = openai_tensors(path, model, found, transposed=transposed, biases=biases)
    left_out = [f"{len(others)} other tensors, {name[:80]} among them" for name in others[:1]]
    facts, iteration = {}, 0
    if states:
        try:
            held, iteration = _adam(folder, states, found)
            for kind, tensors in held.items():
                lazy |= openai_tensors(path, model, tensors, transposed=transposed, biases=biases, prefix=f"{kind}.")
            facts = {
                "optimizer": {
                    "good_steps": iteration,
                    "skipped_steps": 0,
                    "adam_steps": iteration,
                    "loss_scaler": {"scale": 1.0},
                },
                "config": {"optimizer": _numbers(folder)},
            }
        except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RuntimeError) as error:
            left_out.append(f"the optimizer's state ({type(error).__name__}: {str(error)[:200]})")
            lazy = {name: tensor for name, tensor in lazy.items() if name.startswith("model.")}
            facts, iteration = {}, 0
    return ForeignSource(path, "dcp", iteration, model, facts, lazy, left_out)


def _prefix(path: Path, names: list[str]) -> str:
    """What stands before OpenAI's names. ValueError where the tensors are no GPT-2's."""
    tables = [name for name in names if re.fullmatch(rf"(.+\.)?{re.escape(TABLE)}", name)]
    if len(tables) != 1:
        for pattern, whose in OTHERS:
            if name := next((name for name in names if re.search(pattern, name)), None):
                raise ValueError(f"{path}: holds {name[:120]}, a name of {whose}, and this program knows GPT-2")
        some = f"holds {names[0][:120]}" if names else "holds no tensor"
        raise ValueError(f"{path}: is no GPT-2: {some}, and {len(tables)} tensors whose name ends in {TABLE}")
    return tables[0].removesuffix(TABLE)


def _model(
    path: Path, found: Mapping[str, LazyTensor], hints: Hints, log: Callable[[str], None]
) -> tuple[ModelConfig, bool]:
    """The shape, and whether the linear layers are [in, out]."""

    def shape(name: str) -> tuple[int, int]:
        if name not in found or len(found[name].info.shape) != 2:
            raise ValueError(f"{path}: holds no matrix {name}: is it no GPT-2?")
        return found[name].info.shape  # type: ignore[return-value]

    (rows, h), (positions, _) = shape(TABLE), shape("wpe.weight")
    transposed = shape("h.0.attn.c_attn.weight") == (h, 3 * h)
    ffn = shape("h.0.mlp.c_fc.weight")[1 if transposed else 0]
    layers = len({name.split(".")[1] for name in found if re.match(r"h\.\d{1,5}\.", name, re.ASCII)})
    check_layers(path, found, layers)
    gelu = hints.gelu or ("tanh" if transposed else "erf")
    try:
        return ModelConfig(
            num_layers=layers,
            hidden_size=h,
            num_attention_heads=heads_of(path, h, 1, {}, hints),
            ffn_hidden_size=None if ffn == 4 * h else ffn,
            max_position_embeddings=positions,
            vocab_size=true_vocabulary(path, rows, hints, log),
            gelu=gelu,
        ), transposed
    except ValueError as error:
        raise ValueError(f"{path}: {str(error).removeprefix(f'{path}: ')}") from error


def _adam(
    folder: DcpFolder, states: Mapping[str, re.Match[str]], found: Mapping[str, LazyTensor]
) -> tuple[dict[str, dict[str, LazyTensor]], int]:
    """Masters and moments under OpenAI's names, and Adam's steps."""
    held: dict[str, dict[str, LazyTensor]] = {"master": dict(found), "exp_avg": {}, "exp_avg_sq": {}}
    steps = set()
    prefix = next(match[1] for match in states.values() if match[1].endswith(TABLE)).removesuffix(TABLE)
    for name, match in states.items():
        if match[2] == "step":
            steps.add(int(folder.read(name)))
        elif match[1] != prefix.removesuffix("transformer.") + HEAD:  # tied: a copy of the table's
            held[match[2]][WRAPPERS.sub("", match[1].removeprefix(prefix))] = folder.lazy(name)
    for tensors in held.values():
        require(
            tensors.keys() == found.keys()
            and all(
                tensors[name].info == found[name].info and found[name].info.dtype == torch.float32 for name in found
            ),
            "its names, shapes or types are not those of the parameters, in fp32",
        )
    require(len(steps) == 1, f"steps {sorted(steps)[:5]}")
    return held, steps.pop()


def _numbers(folder: DcpFolder) -> dict[str, Any]:
    """AdamW's numbers, as our flags; none where the folder does not hold them."""
    said: dict[str, list[Any]] = {"weight_decay": [], "betas": [], "eps": []}
    for name in folder.objects:
        if number := NUMBER.fullmatch(name):
            said[number[1]].append(folder.object(name))
    if not all(said.values()):
        return {}
    first, second = said["betas"][0]
    config: dict[str, Any] = {
        "weight_decay": max(map(float, said["weight_decay"])),
        "adam_beta1": float(first),
        "adam_beta2": float(second),
        "adam_eps": float(said["eps"][0]),
    }
    OptimizerConfig(**config)  # a ValueError for what cannot be
    return config
