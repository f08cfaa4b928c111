"""A GPT-2 as Megatron has it: the names of its parameters in every version, the ranks that hold them, and its shape.

Legend: h hidden, n heads, t tensor-parallel size, p pipeline stages, v chunks of layers per stage.
"""

import argparse
import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from data_utils.files.inert_pickle import Inert
from megatron.gpt2.checkpoint.source import Source, check_facts
from megatron.gpt2.config import ModelConfig, require
from megatron.gpt2.formats.foreign import (
    GPT2_VOCABULARY,
    TABLE,
    Hints,
    LazyTensor,
    MixedRuns,
    heads_of,
    matrix_shape,
    short_repr,
    whole_number,
)
from megatron.gpt2.model.gpt2 import parameter_specs
from megatron.gpt2.optimizer.optimizer import MOMENTS
from megatron.gpt2.pipeline.schedule import FIRST, LAST, layers_of_stages, virtual_stages
from mpu.partition import PartitionSpec

HEAD = "word_embeddings_for_head.weight"  # the last stage's copy of the tied matrix; Core calls it output_layer.weight
TRUE_VOCABULARY = "true_vocab_size"  # next to the arguments in our exports for Megatron, which does not read it
LAYER = re.compile(r"transformer\.layers\.(\d{1,5})\.(.+)", re.ASCII)
# A word of our names, which are those of 2019, and of Megatron Core's.
CORE_WORDS = {
    "word_embeddings": "embedding.word_embeddings",
    "position_embeddings": "embedding.position_embeddings",
    "transformer": "decoder",
    "attention": "self_attention",
    "query_key_value": "linear_qkv",
    "dense": "linear_proj",
    "post_attention_layernorm": "pre_mlp_layernorm",
    "dense_h_to_4h": "linear_fc1",
    "dense_4h_to_h": "linear_fc2",
    "word_embeddings_for_head": "output_layer",
}
OUR_WORDS = {theirs: ours for ours, theirs in CORE_WORDS.items()} | {
    "encoder": "transformer",  # from v2.6 on
    "input_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "final_norm": "final_layernorm",
}
WITHOUT_MEANING = ("module", "language_model", "embedding")
# Layer norms of Megatron Core, and their names with Transformer Engine, which are those of torch_dist without it, too.
FUSED = {
    ".input_layernorm.": ".self_attention.linear_qkv.layer_norm_",
    ".pre_mlp_layernorm.": ".mlp.linear_fc1.layer_norm_",
}
# Arguments that change the formula, and are absent, None or False in a GPT-2.
OTHER_MODELS = (
    "apply_residual_connection_post_layernorm",
    "swiglu",
    "squared_relu",
    "quick_geglu",
    "apply_layernorm_1p",
    "untie_embeddings_and_output_weights",
    "num_experts",
    "multi_latent_attention",
    "qk_layernorm",
)
PIPELINE, VIRTUAL = "--pipeline-model-parallel-size", "--num-layers-per-virtual-pipeline-stage"
WITH_PIPELINE = ("megatron-v2", "megatron-v3", "megatron-core")
Specs = Mapping[str, PartitionSpec]
Shards = Mapping[str, Sequence[tuple[object, LazyTensor]]]  # of each parameter, rank by rank: its place and its part


# --- names


def our_name(theirs: str) -> str:
    """Our name of a parameter that any version of Megatron calls `theirs`."""
    for plain, fused in FUSED.items():
        theirs = theirs.replace(fused, plain)
    return ".".join(OUR_WORDS.get(word, word) for word in theirs.split(".") if word not in WITHOUT_MEANING)


def core_name(name: str) -> str:
    """transformer.layers.3.attention.dense.bias -> decoder.layers.3.self_attention.linear_proj.bias."""
    return ".".join(CORE_WORDS.get(word, word) for word in name.split("."))


def in_form(format: str, held: Mapping[str, Tensor]) -> dict[str, Any]:
    """A model's tensors, by our names, as Megatron of this format keeps them."""
    if format == "megatron-2019":
        return dict(held)
    if format == "megatron-core":
        return {core_name(name): tensor for name, tensor in held.items()}
    # megatron-v2 has v2.0's names: v2.6, which writes others, and v3 read them too.
    body, attention = ("encoder", ".self_attention.") if format == "megatron-v3" else ("transformer", ".attention.")
    model: dict[str, Any] = {}
    for name, tensor in held.items():
        module, _, rest = name.partition(".")
        folders: tuple[str, ...] = ("language_model", "embedding", module)
        if module == "transformer":
            folders = ("language_model", body)
        elif name == HEAD:
            folders = (module,)
        place = model
        for folder in folders:
            place = place.setdefault(folder, {})
        place[rest.replace(".attention.", attention)] = tensor
    return model


# --- ranks


@dataclass(frozen=True)
class Layout:
    """The ranks that files are written for. first, last: layers of the first and the last stage, if they differ from
    the others'. virtual_layers: layers of a chunk, if stages are interleaved."""

    tensor: int = 1
    pipeline: int = 1
    virtual_layers: int | None = None
    first: int | None = None
    last: int | None = None

    def virtual(self, num_layers: int) -> int:
        """Chunks of layers per stage, v. ValueError that names the flag."""
        return 1 if self.virtual_layers is None else virtual_stages(num_layers, self.pipeline, self.virtual_layers)


def chunks_of_stages(model: ModelConfig, layout: Layout, format: str) -> list[list[dict[str, str]]]:
    """Stage by stage its chunks of the layers: each {its name in the file, in 2019's spelling: our parameter}.

    Layers are numbered from 0 in every chunk. The last stage of several holds the tied matrix as well, as `HEAD`.
    ValueError, which names the flag, for a layout that the format's Megatron cannot load.
    """
    p, v, core = layout.pipeline, layout.virtual(model.num_layers), format == "megatron-core"
    require(p > 0, f"{PIPELINE} must be positive, not {p}")
    if p > 1 and format not in WITH_PIPELINE:
        raise ValueError(f"{PIPELINE} {p}: {format} has no pipeline; {', '.join(WITH_PIPELINE)} have one")
    least = 2 if core else 3
    require(v == 1 or p >= least, f"{VIRTUAL} needs {PIPELINE} of at least {least} in {format}")
    for flag, given in ((FIRST, layout.first), (LAST, layout.last)):
        if given is not None and not core:
            raise ValueError(f"{flag}: the stages of {format} all hold as many layers; megatron-core has this flag")
    layers = layers_of_stages(model.num_layers, p, v, layout.first, layout.last)
    sizes = [tuple(map(len, layers[stage::p])) for stage in range(p)]  # of the chunks of each stage
    middle = sizes[layout.first is not None : p - (layout.last is not None)]
    if len({*middle}) > 1 or any(len({*of_stage}) > 1 for of_stage in sizes):
        chunked = f" with {v} chunks of layers each ({VIRTUAL})" if v > 1 else ""
        advice = f": {FIRST} and {LAST} set some apart" if core else ""
        raise ValueError(
            f"{PIPELINE} {p}{chunked} does not divide the {model.num_layers} layers, and Megatron asks for that{advice}"
        )
    chunks: list[dict[str, str]] = [{} for _ in layers]
    for name in parameter_specs(model):
        if layer := LAYER.fullmatch(name):
            chunk = next(chunk for chunk, held in enumerate(layers) if int(layer[1]) in held)
            chunks[chunk][f"transformer.layers.{int(layer[1]) - layers[chunk].start}.{layer[2]}"] = name
        else:
            chunks[-1 if name.startswith("transformer.") else 0][name] = name
    if p > 1:
        chunks[-1][HEAD] = TABLE
    return [chunks[stage::p] for stage in range(p)]


def whole_tensors(
    kind: str, shards: Shards, specs: Specs, t: int, order: Callable[[Tensor], Tensor] | None = None
) -> dict[str, LazyTensor]:
    """The parameters, or what belongs to them of another `kind`, made of the ranks' parts.

    order: puts a rank's rows of QKV into ours. ValueError that names the place if a part is missing or of another
    shape, or if ranks differ in what all of them hold; MixedRuns if the last stage's copy of the word embeddings does.
    """
    made = {}
    for name, spec in specs.items():
        (origin, first), shape = shards[name][0], spec.local_shape(t)
        for place, part in shards[name]:
            said = f"{place}: {kind}.{name}"
            if part.info.shape != shape:
                raise ValueError(f"{said} has shape {part.info.shape} instead of {shape}")
            if part.info != first.info or (spec.dim is None and not part.equals(first)):
                raise ValueError(
                    f"{said} should be the same on all ranks and is another one in {origin}: are two runs mixed?"
                )
        if len(shards[name]) != t:
            raise ValueError(f"{kind}.{name} is in {len(shards[name])} files instead of {t}: are two runs mixed?")
        change = order if order and ".query_key_value." in name else None
        parts = [part.then(change) if change else part for _, part in shards[name]]
        made[name] = LazyTensor.made_of(partial(_joined, dim=spec.dim), *parts)
    for (place, copy), (origin, part) in zip(shards.get(HEAD, ()), shards[TABLE], strict=False):
        if not copy.equals(part):
            raise MixedRuns(
                f"{place}: {kind}.{HEAD} is not the word embeddings of {origin}, and the head of this program's GPT-2 "
                "is tied to them: are two runs mixed?"
            )
    return made


def _joined(*parts: Tensor, dim: int | None) -> Tensor:
    return parts[0] if dim is None else torch.cat(parts, dim)


def shard(source: Source, name: str, spec: PartitionSpec, kind: str, rank: int, t: int) -> Tensor:
    """A rank's part of a parameter. Rows of padding repeat the last true one, as Megatron's own converter does: its
    softmax counts them, and compared with logits far below 0 those of zero rows would take nearly all. Their moments are 0."""
    full_name = f"{kind}.{name}"
    local = torch.zeros(spec.local_shape(t), dtype=source.tensors[full_name].dtype)
    own = spec.true_part(local, rank, t)
    source.read_into(own, full_name, spec.box(rank, t).offset)
    if len(own) < len(local) and kind not in MOMENTS:
        rows, width = spec.global_shape
        local[len(own) :] = source.read(full_name, (rows - 1, 0), (1, width))
    return local


# --- arguments and shape


def attributes(value: Any) -> dict[str, Any]:
    """The attributes of a namespace, or the entries of a dictionary, by name; none if `value` is neither."""
    return value if isinstance(value, dict) else value.attributes() if isinstance(value, Inert) else {}


def iteration_of(top: Mapping[str, Any]) -> int:
    """The iteration that a file says; 0 if it says none. ValueError if it is not a whole number."""
    name = next((name for name in ("iteration", "total_iters", "global_steps") if name in top), "")
    return whole_number(name, top.get(name, 0), 0, 10**12)


def model_of(
    top: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    found: Mapping[str, int],
    hints: Hints,
    log: Callable[[str], None],
    *,
    t: int,
    padded_for: int,
) -> tuple[ModelConfig, ModelConfig]:
    """The shape, its vocabulary true as far as that is known, and the shape with rows of padding as if they were of the
    vocabulary. `log` gets a line if the vocabulary is only taken to be its padded size.

    top: what stands next to the weights, "args" among it. shapes: by our names, as one of t ranks has them. found: what
    the files say of other arguments. padded_for: the ranks that the vocabulary was padded for. ValueError, one line, if
    they contradict each other.
    """
    args = attributes(top.get("args"))
    for name in OTHER_MODELS:
        require(not args.get(name), f"was trained with {name}, which this program's GPT-2 does not compute")
    shape = partial(matrix_shape, shapes)
    (rows, h), (positions, _) = shape(TABLE), shape("position_embeddings.weight")
    qkv_rows, _ = shape("transformer.layers.0.attention.query_key_value.weight")
    ffn, padded = shape("transformer.layers.0.mlp.dense_h_to_4h.weight")[0] * t, rows * t
    if qkv_rows * t != 3 * h:
        some = f"{3 * h // qkv_rows} ranks" if qkv_rows and 3 * h % qkv_rows == 0 else "another number of ranks"
        raise ValueError(f"was written by {some}, and the files of {t} are here: is one missing?")
    num_layers = len({match[1] for name in shapes if (match := LAYER.fullmatch(name))})
    for name, held in {**found, "num_layers": num_layers, "hidden_size": h, "padded_vocab_size": padded}.items():
        if isinstance(args.get(name), int) and args[name] != held:
            raise ValueError(f"{name} is {args[name]} by its arguments and {held} by its files: are two runs mixed?")
    true, given = top.get(TRUE_VOCABULARY), hints.vocab_size
    if true is not None and not (type(true) is int and 0 < true <= padded):
        raise ValueError(f"{TRUE_VOCABULARY} is {short_repr(true)}, and it holds {padded} rows, padding included")
    if given is not None and given > padded:
        raise ValueError(f"--vocab-size {given} is more than the {padded} rows that it holds, padding included")
    said: dict[str, Any] = {}
    divisor = args.get("make_vocab_size_divisible_by")
    if true is None and given is None:
        guesses = [
            f"{size} ({whose})"
            for size, whose in ((GPT2_VOCABULARY, "GPT-2's"), (args.get("vocab_size"), "its arguments'"))
            if type(size) is int and 0 < padded - size <= 128 * padded_for
        ]
        log(
            f"the vocabulary is taken to be its padded size, {padded}: --vocab-size "
            f"{' or '.join(guesses) or 'N'} leaves out the rows that are padding"
        )
        said["make_vocab_size_divisible_by"] = 1
    elif type(divisor) is int and divisor > 0:
        said["make_vocab_size_divisible_by"] = divisor
    for name in ("attention_dropout", "hidden_dropout", "init_method_std", "layernorm_epsilon", "norm_epsilon"):
        if type(args.get(name)) in (int, float):  # norm_epsilon: the layer norms' since 2023
            said["layernorm_epsilon" if name == "norm_epsilon" else name] = float(args[name])
    # 2019 had only the tanh form, as the fused kernel has; without it later versions compute erf's.
    tanh = "openai_gelu" not in args or args["openai_gelu"] or args.get("bias_gelu_fusion")
    model = ModelConfig(
        num_layers=num_layers,
        hidden_size=h,
        num_attention_heads=heads_of(h, t, args.get("num_attention_heads"), hints),
        ffn_hidden_size=None if ffn == 4 * h else ffn,
        max_position_embeddings=positions,
        vocab_size=true or given or padded,
        gelu=hints.gelu or ("tanh" if tanh else "erf"),
        **said,
    )
    whole = dataclasses.replace(model, vocab_size=padded, make_vocab_size_divisible_by=1)
    specs = parameter_specs(whole)
    for name in sorted(shapes.keys() ^ specs.keys()):
        problem = f"holds no {name}" if name in specs else f"holds {name[:120]}, which is not a part of a GPT-2"
        raise ValueError(f"{problem}: is a pipeline stage missing, or is it another model?")
    return model, whole


def padded_model(source: Source, t: int) -> ModelConfig:
    """The shape, with the padding of the vocabulary that Megatron takes: a multiple of the product, where ours is of
    both numbers."""
    model = check_facts(source)
    require(
        model.num_attention_heads % t == 0 and model.ffn_size % t == 0,
        f"{source.path}: --model-parallel-size {t} does not divide its {model.num_attention_heads} heads and MLP "
        f"width of {model.ffn_size}",
    )
    return dataclasses.replace(model, make_vocab_size_divisible_by=model.make_vocab_size_divisible_by * t)


def arguments(source: Source, model: ModelConfig, layout: Layout, format: str) -> argparse.Namespace:
    """What Megatron compares with its own flags, or takes in their place."""
    facts, t, v = source.facts, layout.tensor, layout.virtual(model.num_layers)
    optimizer = facts["config"].get("optimizer", {})
    same = (
        "num_layers",
        "hidden_size",
        "num_attention_heads",
        "max_position_embeddings",
        "layernorm_epsilon",
        "hidden_dropout",
        "attention_dropout",
        "init_method_std",
    )
    said: dict[str, Any] = {
        **{name: getattr(model, name) for name in same},
        "ffn_hidden_size": model.ffn_size,
        "kv_channels": model.hidden_size // model.num_attention_heads,
        "group_query_attention": False,
        "seq_length": model.max_position_embeddings,
        "position_embedding_type": "learned_absolute",
        "normalization": "LayerNorm",
        "norm_epsilon": model.layernorm_epsilon,
        "add_bias_linear": True,
        "swiglu": False,
        "openai_gelu": False,
        "bias_gelu_fusion": model.gelu == "tanh",
        "untie_embeddings_and_output_weights": False,
        "tokenizer_type": "GPT2BPETokenizer",
        "make_vocab_size_divisible_by": model.make_vocab_size_divisible_by // t,
        "padded_vocab_size": parameter_specs(model, t)[TABLE].padded_size,
        "tensor_model_parallel_size": t,
        "pipeline_model_parallel_size": layout.pipeline,
        "virtual_pipeline_model_parallel_size": v if v > 1 else None,
        "num_layers_per_virtual_pipeline_stage": layout.virtual_layers if v > 1 else None,
        "params_dtype": source.tensors[f"model.{TABLE}"].dtype,
        "iteration": source.iteration,
        "consumed_train_samples": facts.get("consumed_samples") or 0,
        **{name: facts[name] for name in ("global_batch_size", "train_iters") if facts.get(name)},
        **{name: optimizer[name] for name in ("clip_grad",) if name in optimizer},
    }
    if format == "megatron-core":
        said |= {"decoder_first_pipeline_num_layers": layout.first, "decoder_last_pipeline_num_layers": layout.last}
    if format == "megatron-v3":
        said["transformer_impl"] = "local"
    return argparse.Namespace(**said)
