"""GPT-2 under the names that OpenAI gave its parameters: what Hugging Face, nanoGPT and plain folders of DCP share, and
the last two, read and written.

The rows of QKV are [3, heads, head size]. Hugging Face keeps its linear layers [in, out], nanoGPT as ours.

nanoGPT's ckpt.pt holds weights, AdamW's state and `model_args`; meta.pkl holds characters. Its GELU is erf's, its weights
are fp32 and masters of themselves. Its sample.py loads what is written here, and with Adam's state its train.py, too.

A folder of DCP is what `torch.distributed.checkpoint.save` writes of a model that FSDP shards, with or without AdamW's
state, under either's names. It says nothing of heads and formula. Written is what {"model":
get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, adamw)} asks for, under Hugging Face's names.
`model` is a GPT2LMHeadModel, sharded or not, and `adamw` has two groups: matrices, which decay, and vectors.
"""

import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data_utils import Tokenizer
from data_utils.files import flush_to_disk
from data_utils.files.inert_pickle import plain_pickle
from data_utils.tokenizers.base import CharacterTokenizer
from megatron.gpt2.checkpoint.source import Source, TensorInfo, check_facts
from megatron.gpt2.config import ModelConfig, require
from megatron.gpt2.formats.foreign import (
    GPT2_VOCABULARY,
    TABLE,
    ForeignSource,
    Hints,
    LazyTensor,
    State,
    Tensors,
    adam_facts,
    adam_groups,
    by_part,
    has_optimizer,
    head_major,
    heads_of,
    matrix_shape,
    on_disk,
    state_if_known,
    whole_number,
)
from megatron.gpt2.formats.native import new_folder
from megatron.gpt2.formats.torch_files import DcpFolder, load_pickle, save_dcp
from megatron.gpt2.model.gpt2 import parameter_specs
from megatron.gpt2.optimizer.optimizer import MOMENTS

PADDED_VOCABULARY = 50304  # GPT-2's, to a multiple of 64
WTE, HEAD = "wte.weight", "lm_head.weight"
# Our word, and OpenAI's.
WORDS = {
    "word_embeddings": "wte",
    "position_embeddings": "wpe",
    "layers": "h",
    "input_layernorm": "ln_1",
    "attention": "attn",
    "query_key_value": "c_attn",
    "dense": "c_proj",
    "post_attention_layernorm": "ln_2",
    "dense_h_to_4h": "c_fc",
    "dense_4h_to_h": "c_proj",
    "final_layernorm": "ln_f",
}
BUFFERS = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)", re.ASCII)  # the causal mask
SIZES = {"n_layer": "num_layers", "n_embd": "hidden_size", "n_head": "num_attention_heads", "vocab_size": "vocab_size"}
NANOGPT_EPSILON = 1e-5  # of its layer norms
STATE = re.compile(r"(?:.+\.)?optim(?:izer)?\.state\.(.+)\.(exp_avg|exp_avg_sq|step)", re.ASCII)
GROUP = re.compile(r"(?:.+\.)?optim(?:izer)?\.param_groups\.(\d+)\.(weight_decay|betas|eps)", re.ASCII)
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


# --- names and tensors


def openai_name(name: str) -> str:
    """transformer.layers.3.attention.dense.bias -> h.3.attn.c_proj.bias."""
    return ".".join(WORDS.get(word, word) for word in name.split(".") if word != "transformer")


def is_linear(name: str) -> bool:
    """Whether our parameter `name` is the weight of a linear layer, which Hugging Face keeps transposed."""
    return name.endswith((".query_key_value.weight", ".dense.weight", ".dense_h_to_4h.weight", ".dense_4h_to_h.weight"))


def to_openai(x: Tensor, name: str, heads: int, *, transposed: bool = True) -> Tensor:
    """Our parameter `name` as OpenAI lays it out. transposed: linear layers are [in, out]."""
    x = by_part(x, heads) if ".query_key_value." in name else x
    return x.t() if transposed and is_linear(name) else x


def from_openai(x: Tensor, name: str, heads: int, *, transposed: bool = True) -> Tensor:
    """The inverse of `to_openai`."""
    x = x.t() if transposed and is_linear(name) else x
    return head_major(x, heads) if ".query_key_value." in name else x


def weights_of(found: Tensors, left_out: list[str]) -> tuple[dict[str, LazyTensor], bool]:
    """The parameters without what programs put before their names, without buffers and head, and whether there is a
    head; `left_out` gets a line for tensors that are not of this model. ValueError, which names another architecture,
    if it is not a GPT-2, or if its head is not the table."""
    prefix = _prefix(list(found))
    named = {theirs: _without(prefix, theirs) for theirs in found}
    others = [theirs for theirs, name in named.items() if not name]
    left_out += [f"{len(others)} other tensors, {theirs[:80]} among them" for theirs in others[:1]]
    weights = {name: found[theirs] for theirs, name in named.items() if name and not BUFFERS.fullmatch(name)}
    head = weights.pop(HEAD, None)
    if head is not None and not head.equals(weights[WTE]):
        raise ValueError(f"{HEAD} is not {WTE}, and the head of this program's GPT-2 is tied")
    return weights, head is not None


def _prefix(names: Sequence[str]) -> str:
    """What stands before OpenAI's names. ValueError if the tensors are not a GPT-2's."""
    tables = [name for name in names if re.fullmatch(rf"(.+\.)?{re.escape(WTE)}", name)]
    if len(tables) != 1:
        for pattern, whose in OTHERS:
            if name := next((name for name in names if re.search(pattern, name)), None):
                raise ValueError(f"holds {name[:120]}, a name of {whose}, and this program knows GPT-2")
        some = f"holds {names[0][:120]}" if names else "holds no tensor"
        raise ValueError(f"is not a GPT-2: {some}, and {len(tables)} tensors whose name ends in {WTE}")
    return tables[0].removesuffix(WTE)


def _without(prefix: str, name: str) -> str:
    """OpenAI's name of the parameter that is called `name` here; "" for another model's."""
    if name == prefix.removesuffix("transformer.") + HEAD:
        return HEAD
    return WRAPPERS.sub("", name.removeprefix(prefix)) if name.startswith(prefix) else ""


def count_layers(names: Iterable[str]) -> int:
    """The layers that `names`, OpenAI's, have."""
    return len({layer[1] for name in names if (layer := re.match(r"h\.(\d+)\.", name, re.ASCII))})


def our_tensors(model: ModelConfig, found: Tensors, *, transposed: bool, biases: bool = True) -> dict[str, LazyTensor]:
    """`found`, which has OpenAI's names, under ours. ValueError unless it is a GPT-2 of the shape `model`, except that
    the word embeddings may have rows of padding.

    transposed: the linear layers are stored [in, out]. biases: False if there are none, which equals biases of zero.
    """
    layers = count_layers(found)  # before anything is made for each layer
    require(layers == model.num_layers, f"holds {layers} layers instead of {model.num_layers}")
    ours, left = {}, dict(found)
    for name, spec in parameter_specs(model).items():
        theirs, shape = openai_name(name), spec.global_shape
        if not biases and name.endswith(".bias"):
            dtype = found[WTE].info.dtype
            ours[name] = LazyTensor(TensorInfo(dtype, shape), partial(torch.zeros, shape, dtype=dtype))
            continue
        require(theirs in left, f"holds no {theirs}")
        tensor = left.pop(theirs)
        held = tensor.info.shape
        if transposed and is_linear(name):
            shape = shape[::-1]
        if name == TABLE and held[:1] > shape[:1]:
            shape = (held[0], shape[1])
        require(held == shape, f"{theirs} has shape {held} instead of {shape}")
        ours[name] = tensor.then(
            partial(from_openai, name=name, heads=model.num_attention_heads, transposed=transposed)
        )
    if left:
        raise ValueError(f"holds {next(iter(left))!r}, which is not a part of GPT-2")
    return ours


def source_of(
    path: Path,
    format: str,
    tensors: Tensors,
    hints: Hints,
    log: Callable[[str], None],
    read: Callable[[Tensors, Callable[[Tensors], Tensors]], State] | None,
    *,
    heads: Any = None,
    iteration: int | None = None,
    **more: Any,
) -> ForeignSource:
    """A model whose shape its tensors say, except for the heads and the formula. `log` gets a line for a vocabulary that
    may be padded: nanoGPT pads GPT-2's, and says so nowhere.

    read: gives the optimizer's state, given the weights and what puts such tensors under our names. heads: as the
    files say. iteration: default, that of the optimizer. more: fields of the model.
    """
    left_out: list[str] = []
    found, _ = weights_of(tensors, left_out)
    shape = partial(matrix_shape, {name: tensor.info.shape for name, tensor in found.items()})
    (rows, h), (positions, _) = shape(WTE), shape("wpe.weight")
    transposed = shape("h.0.attn.c_attn.weight") == (h, 3 * h)
    ffn = shape("h.0.mlp.c_fc.weight")[transposed]
    if hints.vocab_size is None and rows == PADDED_VOCABULARY:
        log(
            f"the vocabulary is taken to be its padded size, {rows}: --vocab-size {GPT2_VOCABULARY} "
            "(GPT-2's) leaves out the rows that are padding"
        )
    model = ModelConfig(
        num_layers=count_layers(found),
        hidden_size=h,
        num_attention_heads=heads_of(h, 1, heads, hints),
        ffn_hidden_size=None if ffn == 4 * h else ffn,
        max_position_embeddings=positions,
        vocab_size=min(rows, hints.vocab_size or rows),
        gelu=hints.gelu or ("tanh" if transposed else "erf"),
        **more,
    )
    ours = partial(our_tensors, model, transposed=transposed, biases="ln_f.bias" in found)
    weights = ours(found)
    state, facts = state_if_known(partial(read, found, ours), weights, left_out) if read else ({}, {})
    if iteration is None:
        iteration = facts["optimizer"]["adam_steps"] if facts else 0
    return ForeignSource(path, format, iteration, model, facts, {"model": weights, **state}, left_out)


def exported_kind(source: Source, dtype: str) -> str:
    """The kind of tensors that an export in `dtype` is made of, "model" or "master"."""
    return "master" if dtype != "source" and f"master.{TABLE}" in source.tensors else "model"


def exported(source: Source, folder: Path, kind: str, *, transposed: bool) -> dict[str, Tensor]:
    """The tensors of a `kind` under Hugging Face's names, in the order of the model. They wait in nameless files of
    `folder`, so that one at a time is in memory."""
    model, made = check_facts(source), {}
    for name in parameter_specs(model):
        x = to_openai(source.read(f"{kind}.{name}"), name, model.num_attention_heads, transposed=transposed)
        made[f"transformer.{openai_name(name)}"] = on_disk(folder, [x]).view(x.shape)
    return made


def adamw_groups(source: Source, weights: Mapping[str, Tensor]) -> list[tuple[dict[str, Any], list[str]]]:
    """torch's AdamW: what it says of its two groups, and the names in each, matrices first."""
    off = dict.fromkeys(("amsgrad", "maximize", "capturable", "differentiable"), False)
    said = [
        {**group, **off, "foreach": None, "fused": None, "decoupled_weight_decay": True}
        for group in adam_groups(source)
    ]
    names = [[name for name, x in weights.items() if (x.dim() > 1) == decays] for decays in (True, False)]
    return list(zip(said, names, strict=True))


# --- nanoGPT


def open_nanogpt(path: Path, hints: Hints, *, log: Callable[[str], None]) -> ForeignSource:
    """The checkpoint in the file `path`. ValueError, one line, for anything that is not right."""
    top = load_pickle(path)
    if not isinstance(top, dict) or not all(isinstance(top.get(name), dict) for name in ("model", "model_args")):
        raise ValueError("is not a checkpoint of nanoGPT: it has no model and model_args")
    for name, tensor in top["model"].items():
        require(isinstance(tensor, Tensor), f"{str(name)[:80]!r} is not a tensor")
    dropout = top["model_args"].get("dropout", 0.0)
    require(type(dropout) in (int, float), "dropout is not a number")
    return source_of(
        path,
        "nanogpt",
        {str(name): LazyTensor.of(tensor) for name, tensor in top["model"].items()},
        hints,
        log,
        partial(_numbered_state, top["optimizer"]) if "optimizer" in top else None,
        heads=top["model_args"].get("n_head"),
        iteration=whole_number("iter_num", top.get("iter_num", 0), 0, 10**12),
        attention_dropout=dropout,
        hidden_dropout=dropout,
    )


def _numbered_state(optimizer: Mapping[str, Any], found: Tensors, ours: Callable[[Tensors], Tensors]) -> State:
    """AdamW's state, which numbers the parameters: matrices first, then vectors, both in the model's order."""
    order = sorted(found, key=lambda name: len(found[name].info.shape) == 1)
    groups, states = optimizer["param_groups"], optimizer["state"]
    numbers = [number for group in groups for number in map(operator.index, group["params"])]
    named = dict(zip(order, numbers, strict=True))
    held = {kind: {name: LazyTensor.of(states[named[name]][kind]) for name in found} for kind in MOMENTS}
    (step,) = {int(state["step"]) for state in states.values()}
    _, vectors = groups
    require(not vectors["weight_decay"], "biases and layer norms were decayed")
    return {kind: ours(tensors) for kind, tensors in {"master": found, **held}.items()}, adam_facts(step, groups, {})


def write_nanogpt(
    source: Source, out: str | Path, *, tokenizer: Tokenizer | None, log: Callable[[str], None] = print
) -> Path:
    """Write `source` into the new folder `out`: ckpt.pt in fp32, and meta.pkl if its tokens are characters; returns the
    folder. ValueError, one line, for a model that nanoGPT does not have."""
    model, kind = check_facts(source), exported_kind(source, "fp32")
    require(
        model.gelu == "erf",
        f"{source.path}: its GELU is {model.gelu}, and nanoGPT's is erf: the model would give other logits there; "
        "--to huggingface keeps it",
    )
    for flag, value, only in (
        ("--ffn-hidden-size", model.ffn_size, 4 * model.hidden_size),
        ("--layernorm-epsilon", model.layernorm_epsilon, NANOGPT_EPSILON),
    ):
        require(value == only, f"{source.path}: {flag} {value:g} is not {only:g}, and nanoGPT has no other")
    with new_folder(out) as folder:
        weights = {name: x.float() for name, x in exported(source, folder, kind, transposed=False).items()}
        top: dict[str, Any] = {
            "model": {**weights, HEAD: weights[f"transformer.{WTE}"]},
            "model_args": {
                **{name: getattr(model, ours) for name, ours in SIZES.items()},
                "block_size": model.max_position_embeddings,
                "bias": True,
                "dropout": model.hidden_dropout,
            },
            "iter_num": source.iteration,
            "best_val_loss": torch.tensor(1e9),
            "config": {"dataset": Path(out).name},
        }
        if has_optimizer(source):
            moments = {moment: exported(source, folder, moment, transposed=False) for moment in MOMENTS}
            step = torch.tensor(float(source.facts["optimizer"]["adam_steps"]))
            state: dict[int, dict[str, Tensor]] = {}
            groups = []
            for group, names in adamw_groups(source, weights):
                groups.append({**group, "params": list(range(len(state), len(state) + len(names)))})
                for name in names:
                    state[len(state)] = {"step": step, **{moment: moments[moment][name] for moment in MOMENTS}}
            top["optimizer"] = {"state": state, "param_groups": groups}
        else:
            log("left out: the optimizer's state, which the source does not hold: sample.py needs none, train.py does")
        with open(folder / "ckpt.pt", "wb") as file:
            torch.save(top, file)
            flush_to_disk(file)
        if isinstance(tokenizer, CharacterTokenizer):
            itos = dict(enumerate(tokenizer.characters))
            stoi = {character: number for number, character in itos.items()}
            meta = plain_pickle({"vocab_size": tokenizer.vocab_size, "itos": itos, "stoi": stoi})
            (folder / "meta.pkl").write_bytes(meta)
            log(f"sample.py looks for the characters in its own folder: copy meta.pkl to data/{Path(out).name}/")
    return Path(out)


# --- folders of DCP


def open_dcp(path: Path, hints: Hints, *, log: Callable[[str], None]) -> ForeignSource:
    """The model in the folder `path`. ValueError, one line, for anything that is not right, and for another
    architecture by its name."""
    folder = DcpFolder(path)
    states = {name: match for name in folder.tensors if (match := STATE.fullmatch(name))}
    tensors = {name: folder.lazy(name) for name in folder.tensors if name not in states}
    return source_of(path, "dcp", tensors, hints, log, partial(_named_state, folder, states) if states else None)


def _named_state(
    folder: DcpFolder, states: Mapping[str, re.Match[str]], found: Tensors, ours: Callable[[Tensors], Tensors]
) -> State:
    """AdamW's state, which a folder of DCP keeps by the parameters' names."""
    prefix = _prefix([match[1] for match in states.values() if match[2] == MOMENTS[0]])
    held: dict[str, dict[str, LazyTensor]] = {"master": dict(found), **{moment: {} for moment in MOMENTS}}
    steps = set()
    for theirs, match in states.items():
        name = _without(prefix, match[1])
        if match[2] == "step":
            steps.add(int(folder.read(theirs)))
        elif name != HEAD:  # tied: a copy of the table's
            held[match[2]][name] = folder.lazy(theirs)
    groups: dict[str, dict[str, Any]] = {}
    for theirs in folder.objects:
        if said := GROUP.fullmatch(theirs):
            groups.setdefault(said[1], {})[said[2]] = folder.object(theirs)
    (step,) = steps
    return {kind: ours(tensors) for kind, tensors in held.items()}, adam_facts(step, list(groups.values()), {})


def write_dcp(source: Source, out: str | Path) -> Path:
    """Write `source` into the new folder `out`; returns the folder. The weights are the fp32 masters if the source
    holds them, and AdamW's state stands next to them. One tensor at a time is in memory."""
    with new_folder(out) as folder:
        weights = exported(source, folder, exported_kind(source, "fp32"), transposed=True)
        state: dict[str, Any] = {f"model.{name}": x for name, x in weights.items()}
        state[f"model.{HEAD}"] = weights[f"transformer.{WTE}"]
        if has_optimizer(source):
            step = torch.tensor(float(source.facts["optimizer"]["adam_steps"]))
            state |= {f"optimizer.state.{name}.step": step for name in weights}
            for moment in MOMENTS:
                held = exported(source, folder, moment, transposed=True)
                state |= {f"optimizer.state.{name}.{moment}": x for name, x in held.items()}
            for number, (group, names) in enumerate(adamw_groups(source, weights)):
                for key, value in {**group, "params": names}.items():
                    state[f"optimizer.param_groups.{number}.{key}"] = value
        save_dcp(folder, state)
    return Path(out)
