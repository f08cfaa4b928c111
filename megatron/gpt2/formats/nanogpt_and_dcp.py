"""GPT-2 with OpenAI's parameter names, which Hugging Face, nanoGPT and DCP folders use. Read and write nanoGPT's files
and DCP folders.

QKV rows have the order [3, heads, head size]. Hugging Face stores linear layers as [in, out], and nanoGPT as
[out, in].

nanoGPT's ckpt.pt has weights, AdamW's state and `model_args`; its meta.pkl has the characters. nanoGPT uses the erf
form of GELU and fp32 weights, which are also the masters. nanoGPT's sample.py loads our exports, and nanoGPT's train.py
loads exports with Adam's state.

A DCP folder is the output of `torch.distributed.checkpoint.save` for an FSDP model, with or without AdamW's state,
under the names of Hugging Face or nanoGPT. A DCP folder contains neither the number of heads nor the form of GELU. Our
exports have the layout of {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, adamw)}
with Hugging Face's names. `model` is a GPT2LMHeadModel, sharded or not. `adamw` has two groups: matrices with weight
decay, then vectors.
"""

import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data_utils import Tokenizer
from data_utils.command_line import Log, require
from data_utils.files import flush_to_disk
from data_utils.tokenizers.base import CharacterTokenizer
from megatron.gpt2.checkpoint.interface import BaseCheckpoint, TensorInfo, check_metadata
from megatron.gpt2.config import ModelConfig
from megatron.gpt2.formats.foreign_checkpoint import (
    Entries,
    ForeignCheckpoint,
    Hints,
    LazyTensor,
    LazyTensors,
    OptimizerState,
    TensorsByKind,
    adam_metadata,
    adam_param_groups,
    check_integer,
    from_head_major,
    has_optimizer,
    infer_num_heads,
    matrix_shape,
    names_by_group,
    read_adam,
    report_padding,
    same_step,
    spill_to_disk,
    to_head_major,
)
from megatron.gpt2.formats.native import new_folder
from megatron.gpt2.formats.torch_files import DcpCheckpoint, load_torch_file, save_dcp
from megatron.gpt2.model.gpt2 import TIED_WEIGHT, model_partition_specs
from megatron.gpt2.optimizer.optimizer import MOMENTS

GPT2_PADDED_VOCAB_SIZE = 50304  # nanoGPT pads GPT-2's vocabulary to a multiple of 64.
WTE, LM_HEAD = "wte.weight", "lm_head.weight"
# {word in our names: word in OpenAI's names}
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
    """Convert a tensor to our layout: the inverse of `to_openai`."""
    x = x.t() if transposed and is_linear(name) else x
    return to_head_major(x, heads) if ".query_key_value." in name else x


def find_weights(tensors: LazyTensors, left_out: list[str]) -> tuple[dict[str, LazyTensor], bool]:
    """Return the parameters of the model by their names without a prefix, and whether `tensors` has an LM head. Buffers
    and the LM head are not among the parameters. `left_out` gets a line for tensors that do not belong to the model.
    Raises ValueError if the model is not a GPT-2, or if the head differs from the word embeddings."""
    prefix = _find_prefix(list(tensors))
    named = {saved_name: _strip_prefix(prefix, saved_name) for saved_name in tensors}
    foreign_names = [saved_name for saved_name, name in named.items() if not name]
    if foreign_names:
        left_out.append(f"{len(foreign_names)} other tensors, {foreign_names[0][:80]} among them")
    weights = {name: tensors[saved_name] for saved_name, name in named.items() if name and not BUFFERS.fullmatch(name)}
    head = weights.pop(LM_HEAD, None)
    is_tied = head is None or head.equal(weights[WTE])
    require(is_tied, f"{LM_HEAD} is not {WTE}, and the head of this program's GPT-2 is tied")
    return weights, head is not None


def _find_prefix(names: Sequence[str]) -> str:
    """Return the prefix of OpenAI's names in `names`. Raises ValueError if the names are not those of a GPT-2."""
    tables = [name for name in names if re.fullmatch(rf"(.+\.)?{re.escape(WTE)}", name)]
    if len(tables) != 1:
        example = names[0][:120] if names else "no tensor"
        raise ValueError(f"is not a GPT-2: holds {example}, and {len(tables)} tensors with names that end in {WTE}")
    return tables[0].removesuffix(WTE)


def _strip_prefix(prefix: str, name: str) -> str:
    """Return OpenAI's name of the parameter `name`, or "" if it belongs to a different model."""
    if name == prefix.removesuffix("transformer.") + LM_HEAD:
        return LM_HEAD
    return WRAPPERS.sub("", name.removeprefix(prefix)) if name.startswith(prefix) else ""


def to_native_tensors(model: ModelConfig, tensors: LazyTensors, *, transposed: bool) -> dict[str, LazyTensor]:
    """Convert `tensors`, with OpenAI's names, to our names and layout. The word embeddings may have padding rows. If
    `tensors` has no biases, the result has biases of zero. Raises ValueError if a shape does not fit `model`.

    transposed: whether linear layers are [in, out].
    """
    native, remaining, has_biases = {}, dict(tensors), "ln_f.bias" in tensors
    for name, spec in model_partition_specs(model).items():
        saved_name, shape = openai_name(name), spec.global_shape
        if name.endswith(".bias") and not has_biases:
            dtype = tensors[WTE].info.dtype
            native[name] = LazyTensor(TensorInfo(dtype, shape), partial(torch.zeros, shape, dtype=dtype))
            continue
        require(saved_name in remaining, f"holds no {saved_name}")
        tensor = remaining.pop(saved_name)
        if name == TIED_WEIGHT:
            shape = (max(tensor.info.shape[0], shape[0]), shape[1])
        if transposed and is_linear(name):
            shape = shape[::-1]
        require(tensor.info.shape == shape, f"{saved_name} has shape {tensor.info.shape} instead of {shape}")
        native[name] = tensor.map(
            partial(from_openai, name=name, heads=model.num_attention_heads, transposed=transposed)
        )
    require(not remaining, f"holds {next(iter(remaining), '')!r}, which is not a part of GPT-2")
    return native


def build_checkpoint(
    path: Path,
    format: str,
    tensors: LazyTensors,
    saved: Entries,
    hints: Hints,
    log: Log,
    read: Callable[[LazyTensors], OptimizerState] | None = None,
    *,
    tied: Any = True,
    iteration: int | None = None,
    metadata: Entries | None = None,
) -> ForeignCheckpoint:
    """Build a checkpoint from a model's tensors, which give all of its shape except heads and the form of GELU. `log`
    gets a line if the vocabulary may be padded: nanoGPT pads GPT-2's vocabulary and does not save the true size.

    saved: the fields of ModelConfig that are in the file.
    read: returns the optimizer state of the weights, with OpenAI's names.
    tied: True if the file may have no LM head.
    iteration: None stands for the number of optimizer steps.
    """
    left_out: list[str] = []
    weights, has_head = find_weights(tensors, left_out)
    require(has_head or tied is True, f"holds no {LM_HEAD}, but config.json has tie_word_embeddings = false")
    shape = partial(matrix_shape, {name: tensor.info.shape for name, tensor in weights.items()})
    (rows, hidden_size), (positions, _) = shape(WTE), shape("wpe.weight")
    transposed = shape("h.0.attn.c_attn.weight") == (hidden_size, 3 * hidden_size)
    ffn = shape("h.0.mlp.c_fc.weight")[transposed]
    if hints.vocab_size is None and rows == GPT2_PADDED_VOCAB_SIZE:
        report_padding(rows, log)
    shapes = {
        "num_layers": len({layer[1] for name in weights if (layer := re.match(r"h\.(\d+)\.", name, re.ASCII))}),
        "hidden_size": hidden_size,
        "max_position_embeddings": positions,
        "vocab_size": rows,
        "ffn_hidden_size": None if ffn == 4 * hidden_size else ffn,
    }
    for name in shapes.keys() & saved.keys():
        is_same = shapes[name] == saved[name]
        require(is_same, f"its {name} is {saved[name]} by its configuration and {shapes[name]} by its tensors")
    fields = {
        "gelu": hints.gelu or ("tanh" if transposed else "erf"),
        **saved,
        **shapes,
        "num_attention_heads": infer_num_heads(hidden_size, 1, saved.get("num_attention_heads"), hints),
        "vocab_size": min(rows, hints.vocab_size or rows),
    }
    model = ModelConfig(**fields)
    to_native = partial(to_native_tensors, model, transposed=transposed)

    def read_optimizer(read: Callable[[LazyTensors], OptimizerState]) -> OptimizerState:
        states, values = read(weights)
        return {kind: to_native(tensors) for kind, tensors in states.items()}, values

    optimizer = partial(read_optimizer, read) if read else None
    return ForeignCheckpoint(path, format, iteration, model, metadata or {}, to_native(weights), left_out, optimizer)


def export_kind(source: BaseCheckpoint, dtype: str) -> str:
    """Return the kind of tensors to export in `dtype`: "master" if `dtype` is not "source" and masters exist, else
    "model"."""
    return "master" if dtype != "source" and f"master.{TIED_WEIGHT}" in source.tensors else "model"


def export_tensors(
    source: BaseCheckpoint, kind: str, *, transposed: bool, dtype: torch.dtype | None = None
) -> dict[str, LazyTensor]:
    """Return the tensors of a `kind` under Hugging Face's names, in the order of the model.

    dtype: the dtype of the tensors (default: the saved one).
    """
    model = check_metadata(source)

    def converted(x: Tensor, name: str) -> Tensor:
        return to_openai(x.to(dtype), name, model.num_attention_heads, transposed=transposed)

    return {
        f"transformer.{openai_name(name)}": LazyTensor.from_checkpoint(source, f"{kind}.{name}").map(
            partial(converted, name=name)
        )
        for name in model_partition_specs(model)
    }


def export_state(
    source: BaseCheckpoint, folder: Path, *, transposed: bool, dtype: torch.dtype | None = None
) -> dict[str, dict[str, Tensor]]:
    """Return {kind: {Hugging Face's name: tensor}}: the weights (kind "model"), from the masters if there are any, and
    AdamW's moments if the source has them. The tensors are memory-mapped from temporary files in `folder`, because
    torch's writers need all tensors at once."""
    kinds = {"model": export_kind(source, "fp32")}
    if has_optimizer(source):
        kinds |= {moment: moment for moment in MOMENTS}
    return {
        kind: {
            name: spill_to_disk(folder, [x.load()], x.info.shape)
            for name, x in export_tensors(source, saved, transposed=transposed, dtype=dtype).items()
        }
        for kind, saved in kinds.items()
    }


def adamw_param_groups(source: BaseCheckpoint, weights: Mapping[str, Tensor]) -> list[tuple[dict[str, Any], list[str]]]:
    """Return the two param groups of torch's AdamW, matrices first, each with its settings and the names of its
    parameters."""
    off = dict.fromkeys(("amsgrad", "maximize", "capturable", "differentiable"), False)
    settings = [
        {**group, **off, "foreach": None, "fused": None, "decoupled_weight_decay": True}
        for group in adam_param_groups(source)
    ]
    return list(zip(settings, names_by_group(weights), strict=True))


def adam_step(source: BaseCheckpoint) -> Tensor:
    """Return the number of AdamW's steps as torch stores it, a tensor of float32."""
    return torch.tensor(float(source.metadata["optimizer"]["adam_steps"]))


# --- nanoGPT


def open_nanogpt(path: Path, hints: Hints, *, log: Log) -> ForeignCheckpoint:
    """Open nanoGPT's checkpoint `path`. Raises ValueError, in one line, if the file is not valid."""
    top = load_torch_file(path)
    is_known = isinstance(top, dict) and top.keys() >= {"model", "model_args"}
    require(is_known, "is not a checkpoint of nanoGPT: model or model_args is missing")
    args, optimizer = top["model_args"], top.get("optimizer")
    saved = {"num_attention_heads": args.get("n_head")}
    saved |= dict.fromkeys(("attention_dropout", "hidden_dropout"), args.get("dropout", 0.0))
    return build_checkpoint(
        path,
        "nanogpt",
        {name: LazyTensor.from_tensor(tensor) for name, tensor in top["model"].items()},
        saved,
        hints,
        log,
        partial(_numbered_state, optimizer) if optimizer is not None else None,
        iteration=check_integer("iter_num", top.get("iter_num", 0), 0, 10**12),
    )


def _numbered_state(optimizer: Entries, weights: LazyTensors) -> OptimizerState:
    states, groups, step = read_adam(optimizer, weights)
    require(not groups[1]["weight_decay"], "biases and layer norms have weight decay")
    return states, adam_metadata(step, groups, {})


def write_nanogpt(source: BaseCheckpoint, out: str | Path, *, tokenizer: Tokenizer | None, log: Log = print) -> Path:
    """Write `source` into the new folder `out`, and return the folder: ckpt.pt in fp32, and meta.pkl for a character
    tokenizer. Raises ValueError, in one line, for a model that nanoGPT cannot load."""
    model = check_metadata(source)
    require(
        model.gelu == "erf",
        f"{source.path}: its GELU is {model.gelu}, and nanoGPT's is erf, so the logits would differ; --to huggingface "
        "keeps the GELU",
    )
    for flag, value, required in (
        ("--ffn-hidden-size", model.ffn_size, 4 * model.hidden_size),
        ("--layernorm-epsilon", model.layernorm_epsilon, NANOGPT_EPSILON),
    ):
        require(value == required, f"{source.path}: {flag} is {value:g}, and nanoGPT supports only {required:g}")
    with new_folder(out) as folder:
        state = export_state(source, folder, transposed=False, dtype=torch.float32)
        weights = state.pop("model")
        top: dict[str, Any] = {
            "model": {**weights, LM_HEAD: weights[f"transformer.{WTE}"]},
            "model_args": {
                **{name: getattr(model, field) for name, field in CONFIG_SIZES.items()},
                "block_size": model.max_position_embeddings,
                "bias": True,
                "dropout": model.hidden_dropout,
            },
            "iter_num": source.iteration,
            "best_val_loss": torch.tensor(1e9),
            "config": {"dataset": Path(out).name},
        }
        if state:
            numbered: list[dict[str, Tensor]] = []
            groups = []
            for group, names in adamw_param_groups(source, weights):
                groups.append({**group, "params": list(range(len(numbered), len(numbered) + len(names)))})
                numbered += [
                    {"step": adam_step(source), **{kind: moments[name] for kind, moments in state.items()}}
                    for name in names
                ]
            top["optimizer"] = {"state": dict(enumerate(numbered)), "param_groups": groups}
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


def open_dcp(path: Path, hints: Hints, *, log: Log) -> ForeignCheckpoint:
    """Open the model in the DCP folder `path`. Raises ValueError, in one line, if the folder is not valid or does not
    contain a GPT-2."""
    folder = DcpCheckpoint(path)
    tensors = {name: LazyTensor.from_checkpoint(folder, name) for name in folder.tensors}
    matches = [match for name in tensors if (match := OPTIMIZER_STATE.fullmatch(name))]
    states = {(match[2], match[1]): tensors.pop(match[0]) for match in matches}
    return build_checkpoint(
        path, "dcp", tensors, {}, hints, log, partial(_named_state, folder, states) if states else None
    )


def _named_state(
    folder: DcpCheckpoint, states: Mapping[tuple[str, str], LazyTensor], weights: LazyTensors
) -> OptimizerState:
    """Read AdamW's state, which a DCP folder stores by parameter name.

    states: the tensors by kind, such as "exp_avg", and parameter.
    """
    prefix = _find_prefix([name for kind, name in states if kind == MOMENTS[0]])
    kinds: TensorsByKind = {kind: {} for kind in (*MOMENTS, "step")}
    for (kind, name), tensor in states.items():
        kinds[kind][_strip_prefix(prefix, name)] = tensor
    step = same_step(x.load() for x in kinds.pop("step").values())
    for tensors in kinds.values():
        tensors.pop(LM_HEAD, None)  # The tied head has a copy of the state of the word embeddings.
    groups: dict[str, dict[str, Any]] = {}
    for key in folder.objects:
        if setting := PARAM_GROUP.fullmatch(key):
            groups.setdefault(setting[1], {})[setting[2]] = folder.object(key)
    return kinds, adam_metadata(step, list(groups.values()), {})


def write_dcp(source: BaseCheckpoint, out: str | Path) -> Path:
    """Write `source` into the new folder `out`, and return the folder. If the source has masters, they are written as
    the weights, and AdamW's state is written, too. Only one tensor at a time must be in memory."""
    with new_folder(out) as folder:
        exported = export_state(source, folder, transposed=True)
        weights = exported.pop("model")
        state: dict[str, Any] = {f"model.{name}": x for name, x in weights.items()}
        state[f"model.{LM_HEAD}"] = weights[f"transformer.{WTE}"]
        for kind, moments in exported.items():
            state |= {f"optimizer.state.{name}.{kind}": x for name, x in moments.items()}
        if exported:
            state |= {f"optimizer.state.{name}.step": adam_step(source) for name in weights}
            for number, (group, names) in enumerate(adamw_param_groups(source, weights)):
                for key, value in {**group, "params": names}.items():
                    state[f"optimizer.param_groups.{number}.{key}"] = value
        save_dcp(folder, state)
    return Path(out)
