"""GPT-2 with OpenAI's parameter names, which Hugging Face, nanoGPT and DCP folders use. Read and write the last two.

QKV rows have the order [3, heads, head size]. Hugging Face stores linear layers as [in, out], nanoGPT as [out, in].

nanoGPT's ckpt.pt has weights, AdamW's state and `model_args`; its meta.pkl has the characters. nanoGPT uses the erf
form of GELU and fp32 weights, which are also the masters. Its sample.py loads our exports. Its train.py loads them if
they have Adam's state.

A DCP folder is the output of `torch.distributed.checkpoint.save` for an FSDP model, with or without AdamW's state,
under the names of Hugging Face or nanoGPT. It contains neither the number of heads nor the form of GELU. Our
exports have the layout of {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model,
adamw)} with Hugging Face's names. `model` is a GPT2LMHeadModel, sharded or not. `adamw` has two groups: matrices
with weight decay, then vectors.
"""

import operator
import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data_utils import Tokenizer
from data_utils.command_line import require
from data_utils.files import flush_to_disk
from data_utils.tokenizers.base import CharacterTokenizer
from megatron.gpt2.checkpoint.interface import BaseCheckpoint, TensorInfo, check_metadata
from megatron.gpt2.config import ModelConfig
from megatron.gpt2.formats.foreign_checkpoint import (
    GPT2_VOCAB_SIZE,
    ForeignCheckpoint,
    Hints,
    LazyTensor,
    LazyTensors,
    OptimizerState,
    adam_metadata,
    adam_param_groups,
    check_integer,
    from_head_major,
    has_optimizer,
    infer_num_heads,
    matrix_shape,
    report_padding,
    spill_to_disk,
    to_head_major,
)
from megatron.gpt2.formats.native import new_folder
from megatron.gpt2.formats.torch_files import DcpCheckpoint, load_torch_file, save_dcp
from megatron.gpt2.model.gpt2 import TIED_WEIGHT, model_partition_specs
from megatron.gpt2.optimizer.optimizer import MOMENTS

GPT2_PADDED_VOCAB_SIZE = 50304  # nanoGPT pads GPT-2's vocabulary to a multiple of 64.
WTE, LM_HEAD = "wte.weight", "lm_head.weight"
# Each pair has a part of our names and the same part of OpenAI's names.
OPENAI_WORDS = {
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
# OpenAI's names include buffers of the causal mask, which are not read.
BUFFERS = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)", re.ASCII)
CONFIG_SIZES = {
    "n_layer": "num_layers",
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "vocab_size": "vocab_size",
}
NANOGPT_EPSILON = 1e-5  # the epsilon of nanoGPT's layer norms
OPTIMIZER_STATE = re.compile(r"(?:.+\.)?optim(?:izer)?\.state\.(.+)\.(exp_avg|exp_avg_sq|step)", re.ASCII)
PARAM_GROUP = re.compile(r"(?:.+\.)?optim(?:izer)?\.param_groups\.(\d+)\.(weight_decay|betas|eps)", re.ASCII)
WRAPPERS = re.compile(r"(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.", re.ASCII)
# A checkpoint whose names match one of these patterns has another architecture.
OTHER_ARCHITECTURES = (
    (r"self_attn\.q_proj|attention\.wq\.|attn\.wq\.", "Llama or a similar model"),
    (r"gpt_neox\.", "GPT-NeoX"),
    (r"decoder\.layers\.self_attention|\.linear_qkv\.", "Megatron Core's, without its metadata.json"),
    (r"encoder\.layer\.|bert\.", "BERT"),
    (r"(encoder|decoder)\.block\.", "T5"),
    (r"word_embeddings\.", "BLOOM"),
)


# --- names and tensors


def openai_name(name: str) -> str:
    """Return OpenAI's name of our parameter `name`, such as h.3.attn.c_proj.bias."""
    return ".".join(OPENAI_WORDS.get(word, word) for word in name.split(".") if word != "transformer")


def is_linear(name: str) -> bool:
    """Return True if our parameter `name` is the weight of a linear layer, which Hugging Face stores transposed."""
    return name.endswith((".query_key_value.weight", ".dense.weight", ".dense_h_to_4h.weight", ".dense_4h_to_h.weight"))


def to_openai(x: Tensor, name: str, heads: int, *, transposed: bool = True) -> Tensor:
    """Convert our parameter `name` to OpenAI's layout.

    transposed: whether linear layers are [in, out].
    """
    x = from_head_major(x, heads) if ".query_key_value." in name else x
    return x.t() if transposed and is_linear(name) else x


def from_openai(x: Tensor, name: str, heads: int, *, transposed: bool = True) -> Tensor:
    """Convert a tensor to our layout. This is the inverse of `to_openai`."""
    x = x.t() if transposed and is_linear(name) else x
    return to_head_major(x, heads) if ".query_key_value." in name else x


def find_weights(found: LazyTensors, left_out: list[str]) -> tuple[dict[str, LazyTensor], bool]:
    """Return the parameters of the model by their names without a prefix, and whether `found` has an LM head. Buffers
    and the LM head are not among the parameters. `left_out` gets a line for tensors that do not belong to the model.
    Raises ValueError if the model is not a GPT-2, with the name of the other architecture if it is known, or if the
    head differs from the word embeddings."""
    prefix = _find_prefix(list(found))
    named = {theirs: _strip_prefix(prefix, theirs) for theirs in found}
    others = [theirs for theirs, name in named.items() if not name]
    left_out += [f"{len(others)} other tensors, {theirs[:80]} among them" for theirs in others[:1]]
    weights = {name: found[theirs] for theirs, name in named.items() if name and not BUFFERS.fullmatch(name)}
    head = weights.pop(LM_HEAD, None)
    if head is not None and not head.equal(weights[WTE]):
        raise ValueError(f"{LM_HEAD} is not {WTE}, and the head of this program's GPT-2 is tied")
    return weights, head is not None


def _find_prefix(names: Sequence[str]) -> str:
    """Return the prefix of OpenAI's names in `names`. Raises ValueError if the names are not those of a GPT-2."""
    tables = [name for name in names if re.fullmatch(rf"(.+\.)?{re.escape(WTE)}", name)]
    if len(tables) != 1:
        for pattern, whose in OTHER_ARCHITECTURES:
            if name := next((name for name in names if re.search(pattern, name)), None):
                raise ValueError(f"holds {name[:120]}, a name of {whose}, and this program reads only GPT-2")
        some = f"holds {names[0][:120]}" if names else "holds no tensor"
        raise ValueError(f"is not a GPT-2: {some}, and {len(tables)} tensors with names that end in {WTE}")
    return tables[0].removesuffix(WTE)


def _strip_prefix(prefix: str, name: str) -> str:
    """Return OpenAI's name of the parameter `name`, or "" if it belongs to a different model."""
    if name == prefix.removesuffix("transformer.") + LM_HEAD:
        return LM_HEAD
    return WRAPPERS.sub("", name.removeprefix(prefix)) if name.startswith(prefix) else ""


def to_native_tensors(
    model: ModelConfig, found: LazyTensors, *, transposed: bool, biases: bool = True
) -> dict[str, LazyTensor]:
    """Convert `found`, with OpenAI's names, to our names and layout. The word embeddings may have padding rows. Raises
    ValueError if other shapes differ from `model`.

    transposed: linear layers are stored [in, out].
    biases: False for a model without biases, which get zeros here.
    """
    ours, left = {}, dict(found)
    for name, spec in model_partition_specs(model).items():
        theirs, shape = openai_name(name), spec.global_shape
        if not biases and name.endswith(".bias"):
            dtype = found[WTE].info.dtype
            ours[name] = LazyTensor(TensorInfo(dtype, shape), partial(torch.zeros, shape, dtype=dtype))
            continue
        require(theirs in left, f"holds no {theirs}")
        tensor = left.pop(theirs)
        if name == TIED_WEIGHT:
            shape = (max(tensor.info.shape[0], shape[0]), shape[1])
        if transposed and is_linear(name):
            shape = shape[::-1]
        require(tensor.info.shape == shape, f"{theirs} has shape {tensor.info.shape} instead of {shape}")
        ours[name] = tensor.map(partial(from_openai, name=name, heads=model.num_attention_heads, transposed=transposed))
    if left:
        raise ValueError(f"holds {next(iter(left))!r}, which is not a part of GPT-2")
    return ours


def build_checkpoint(
    path: Path,
    format: str,
    tensors: LazyTensors,
    hints: Hints,
    log: Callable[[str], None],
    read: Callable[[LazyTensors, Callable[[LazyTensors], LazyTensors]], OptimizerState] | None = None,
    *,
    heads: Any = None,
    gelu: str | None = None,
    sizes: Mapping[str, int | None] | None = None,
    tied: Any = True,
    iteration: int | None = None,
    metadata: Mapping[str, Any] | None = None,
    **more: Any,
) -> ForeignCheckpoint:
    """Build the checkpoint of a model from its tensors, which give its shape except heads and the form of GELU. `log`
    gets a line if the vocabulary may be padded: nanoGPT pads that of GPT-2 without saving the true size.

    read: returns the optimizer state, given the weights and a function that converts tensors to our names.
    heads, gelu: values from the file.
    sizes: fields of ModelConfig from the file, which must fit the tensors.
    tied: True if the file may lack a head.
    iteration: default, the optimizer's steps.
    more: other fields of ModelConfig.
    """
    left_out: list[str] = []
    found, has_head = find_weights(tensors, left_out)
    require(has_head or tied is True, f"holds no {LM_HEAD}, but config.json has tie_word_embeddings = false")
    shape = partial(matrix_shape, {name: tensor.info.shape for name, tensor in found.items()})
    (rows, hidden_size), (positions, _) = shape(WTE), shape("wpe.weight")
    transposed = shape("h.0.attn.c_attn.weight") == (hidden_size, 3 * hidden_size)
    ffn = shape("h.0.mlp.c_fc.weight")[transposed]
    if hints.vocab_size is None and rows == GPT2_PADDED_VOCAB_SIZE:
        report_padding(rows, [f"{GPT2_VOCAB_SIZE} (GPT-2's)"], log)
    shapes = {
        "num_layers": len({layer[1] for name in found if (layer := re.match(r"h\.(\d+)\.", name, re.ASCII))}),
        "hidden_size": hidden_size,
        "max_position_embeddings": positions,
        "vocab_size": rows,
        "ffn_hidden_size": None if ffn == 4 * hidden_size else ffn,
    }
    for name, size in (sizes or {}).items():
        require(shapes[name] == size, f"its {name} is {size} by config.json and {shapes[name]} by its tensors")
    model = ModelConfig(
        **{**shapes, "vocab_size": min(rows, hints.vocab_size or rows)},  # type: ignore[arg-type]
        num_attention_heads=infer_num_heads(hidden_size, 1, heads, hints),
        gelu=gelu or hints.gelu or ("tanh" if transposed else "erf"),
        **more,
    )
    ours = partial(to_native_tensors, model, transposed=transposed, biases="ln_f.bias" in found)
    optimizer = partial(read, found, ours) if read else None
    return ForeignCheckpoint(path, format, iteration, model, metadata or {}, ours(found), left_out, optimizer)


def export_kind(source: BaseCheckpoint, dtype: str) -> str:
    """Return the kind of tensors to export in `dtype`: "master" if `dtype` is not "source" and masters exist, else
    "model"."""
    return "master" if dtype != "source" and f"master.{TIED_WEIGHT}" in source.tensors else "model"


def export_tensors(
    source: BaseCheckpoint, folder: Path, kind: str, *, transposed: bool, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Return the tensors of a `kind` under Hugging Face's names, in the order of the model. They are memory-mapped from
    temporary files in `folder`, so that only one at a time must be in memory.

    dtype: the dtype of the tensors (default: the saved one).
    """
    model, made = check_metadata(source), {}
    for name in model_partition_specs(model):
        x = source.read(f"{kind}.{name}").to(dtype)
        x = to_openai(x, name, model.num_attention_heads, transposed=transposed)
        made[f"transformer.{openai_name(name)}"] = spill_to_disk(folder, [x]).view(x.shape)
    return made


def adamw_param_groups(source: BaseCheckpoint, weights: Mapping[str, Tensor]) -> list[tuple[dict[str, Any], list[str]]]:
    """Return the two param groups of torch's AdamW, matrices first, each with its settings and the names of its
    parameters."""
    off = dict.fromkeys(("amsgrad", "maximize", "capturable", "differentiable"), False)
    settings = [
        {**group, **off, "foreach": None, "fused": None, "decoupled_weight_decay": True}
        for group in adam_param_groups(source)
    ]
    names = [[name for name, x in weights.items() if (x.dim() > 1) == decays] for decays in (True, False)]
    return list(zip(settings, names, strict=True))


# --- nanoGPT


def open_nanogpt(path: Path, hints: Hints, *, log: Callable[[str], None]) -> ForeignCheckpoint:
    """Open nanoGPT's checkpoint `path`. Raises ValueError, in one line, if it is not valid."""
    top = load_torch_file(path)
    if not isinstance(top, dict) or not all(isinstance(top.get(name), dict) for name in ("model", "model_args")):
        raise ValueError("is not a checkpoint of nanoGPT: model or model_args is missing")
    for name, tensor in top["model"].items():
        require(isinstance(tensor, Tensor), f"{str(name)[:80]!r} is not a tensor")
    dropout = top["model_args"].get("dropout", 0.0)
    require(type(dropout) in (int, float), "dropout is not a number")
    return build_checkpoint(
        path,
        "nanogpt",
        {str(name): LazyTensor.from_tensor(tensor) for name, tensor in top["model"].items()},
        hints,
        log,
        partial(_numbered_state, top["optimizer"]) if "optimizer" in top else None,
        heads=top["model_args"].get("n_head"),
        iteration=check_integer("iter_num", top.get("iter_num", 0), 0, 10**12),
        attention_dropout=dropout,
        hidden_dropout=dropout,
    )


def _numbered_state(
    optimizer: Mapping[str, Any], found: LazyTensors, ours: Callable[[LazyTensors], LazyTensors]
) -> OptimizerState:
    """Read AdamW's state, which has numbers instead of names: first matrices, then vectors, both in the model's
    order."""
    order = sorted(found, key=lambda name: len(found[name].info.shape) == 1)
    groups, states = optimizer["param_groups"], optimizer["state"]
    numbers = [number for group in groups for number in map(operator.index, group["params"])]
    named = dict(zip(order, numbers, strict=True))
    moments = {kind: {name: LazyTensor.from_tensor(states[named[name]][kind]) for name in found} for kind in MOMENTS}
    (step,) = {int(state["step"]) for state in states.values()}
    _, vectors = groups
    require(not vectors["weight_decay"], "biases and layer norms have weight decay")
    return {kind: ours(tensors) for kind, tensors in moments.items()}, adam_metadata(step, groups, {})


def write_nanogpt(
    source: BaseCheckpoint, out: str | Path, *, tokenizer: Tokenizer | None, log: Callable[[str], None] = print
) -> Path:
    """Write `source` into the new folder `out`, and return the folder: ckpt.pt in fp32, and meta.pkl for a character
    tokenizer. Raises ValueError, in one line, for a model that nanoGPT cannot load."""
    model, kind = check_metadata(source), export_kind(source, "fp32")
    require(
        model.gelu == "erf",
        f"{source.path}: its GELU is {model.gelu}, and nanoGPT's is erf, so the logits would differ; --to huggingface "
        "keeps the GELU",
    )
    for flag, value, only in (
        ("--ffn-hidden-size", model.ffn_size, 4 * model.hidden_size),
        ("--layernorm-epsilon", model.layernorm_epsilon, NANOGPT_EPSILON),
    ):
        require(value == only, f"{source.path}: {flag} is {value:g}, and nanoGPT supports only {only:g}")
    with new_folder(out) as folder:
        weights = export_tensors(source, folder, kind, transposed=False, dtype=torch.float32)
        top: dict[str, Any] = {
            "model": {**weights, LM_HEAD: weights[f"transformer.{WTE}"]},
            "model_args": {
                **{name: getattr(model, ours) for name, ours in CONFIG_SIZES.items()},
                "block_size": model.max_position_embeddings,
                "bias": True,
                "dropout": model.hidden_dropout,
            },
            "iter_num": source.iteration,
            "best_val_loss": torch.tensor(1e9),
            "config": {"dataset": Path(out).name},
        }
        if has_optimizer(source):
            moments = {moment: export_tensors(source, folder, moment, transposed=False) for moment in MOMENTS}
            step = torch.tensor(float(source.metadata["optimizer"]["adam_steps"]))
            state: dict[int, dict[str, Tensor]] = {}
            groups = []
            for group, names in adamw_param_groups(source, weights):
                groups.append({**group, "params": list(range(len(state), len(state) + len(names)))})
                for name in names:
                    state[len(state)] = {"step": step, **{moment: moments[moment][name] for moment in MOMENTS}}
            top["optimizer"] = {"state": state, "param_groups": groups}
        else:
            log(
                "left out: the optimizer's state, which the source does not hold: only train.py needs it, not sample.py"
            )
        with open(folder / "ckpt.pt", "wb") as file:
            torch.save(top, file)
            flush_to_disk(file)
        if isinstance(tokenizer, CharacterTokenizer):
            itos = dict(enumerate(tokenizer.characters))
            stoi = {character: number for number, character in itos.items()}
            meta = {"vocab_size": tokenizer.vocab_size, "itos": itos, "stoi": stoi}
            (folder / "meta.pkl").write_bytes(pickle.dumps(meta, protocol=2))
            log(f"sample.py looks for the characters in its own folder: copy meta.pkl to data/{Path(out).name}/")
    return Path(out)


# --- folders of DCP


def open_dcp(path: Path, hints: Hints, *, log: Callable[[str], None]) -> ForeignCheckpoint:
    """Open the model in the DCP folder `path`. Raises ValueError, in one line, if it is not valid or not a GPT-2."""
    folder = DcpCheckpoint(path)
    states = {name: match for name in folder.tensors if (match := OPTIMIZER_STATE.fullmatch(name))}
    tensors = {name: folder.lazy_tensor(name) for name in folder.tensors if name not in states}
    return build_checkpoint(path, "dcp", tensors, hints, log, partial(_named_state, folder, states) if states else None)


def _named_state(
    folder: DcpCheckpoint,
    states: Mapping[str, re.Match[str]],
    found: LazyTensors,
    ours: Callable[[LazyTensors], LazyTensors],
) -> OptimizerState:
    """Read AdamW's state, which a DCP folder has by parameter name."""
    prefix = _find_prefix([match[1] for match in states.values() if match[2] == MOMENTS[0]])
    kinds: dict[str, dict[str, LazyTensor]] = {moment: {} for moment in MOMENTS}
    steps = set()
    for theirs, match in states.items():
        name = _strip_prefix(prefix, match[1])
        if match[2] == "step":
            steps.add(int(folder.read(theirs)))
        elif name != LM_HEAD:  # skip the tied head, whose state is a copy of the word embeddings'
            kinds[match[2]][name] = folder.lazy_tensor(theirs)
    groups: dict[str, dict[str, Any]] = {}
    for theirs in folder.objects:
        if setting := PARAM_GROUP.fullmatch(theirs):
            groups.setdefault(setting[1], {})[setting[2]] = folder.object(theirs)
    (step,) = steps
    return {kind: ours(tensors) for kind, tensors in kinds.items()}, adam_metadata(step, list(groups.values()), {})


def write_dcp(source: BaseCheckpoint, out: str | Path) -> Path:
    """Write `source` into the new folder `out`, and return the folder. If the source has masters, they are the weights,
    and AdamW's state is written, too. Only one tensor at a time must be in memory."""
    with new_folder(out) as folder:
        weights = export_tensors(source, folder, export_kind(source, "fp32"), transposed=True)
        state: dict[str, Any] = {f"model.{name}": x for name, x in weights.items()}
        state[f"model.{LM_HEAD}"] = weights[f"transformer.{WTE}"]
        if has_optimizer(source):
            step = torch.tensor(float(source.metadata["optimizer"]["adam_steps"]))
            state |= {f"optimizer.state.{name}.step": step for name in weights}
            for moment in MOMENTS:
                tensors = export_tensors(source, folder, moment, transposed=True)
                state |= {f"optimizer.state.{name}.{moment}": x for name, x in tensors.items()}
            for number, (group, names) in enumerate(adamw_param_groups(source, weights)):
                for key, value in {**group, "params": names}.items():
                    state[f"optimizer.param_groups.{number}.{key}"] = value
        save_dcp(folder, state)
    return Path(out)
