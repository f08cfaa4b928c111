"""GPT-2 in Megatron's checkpoints: parameter names of every version, the shards of each rank, and the model's shape."""

import argparse
import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from data_utils.command_line import Log, plural, require
from data_utils.files.restricted_pickle import PickledObject
from megatron.gpt2.checkpoint.interface import BaseCheckpoint, check_metadata
from megatron.gpt2.config import ModelConfig
from megatron.gpt2.formats.foreign_checkpoint import (
    Entries,
    Hints,
    LazyTensor,
    LazyTensors,
    TensorsByKind,
    check_integer,
    infer_num_heads,
    matrix_shape,
    report_padding,
    short_repr,
)
from megatron.gpt2.model.gpt2 import TIED_WEIGHT, model_partition_specs
from megatron.gpt2.optimizer.optimizer import MOMENTS
from megatron.gpt2.pipeline.schedule import (
    FIRST_LAYERS_FLAG,
    LAST_LAYERS_FLAG,
    layers_of_virtual_stages,
    num_model_chunks,
)
from mpu.partition import PartitionSpec

# The last pipeline stage has a copy of the tied word embeddings, which Megatron Core calls output_layer.weight.
EMBEDDINGS_FOR_HEAD = "word_embeddings_for_head.weight"
TRUE_VOCAB_SIZE = "true_vocab_size"  # Our exports have this key, which Megatron does not read.
LAYER = re.compile(r"transformer\.layers\.(\d{1,5})\.(.+)", re.ASCII)
# {word in our names, which are the names of Megatron in 2019: word in Megatron Core's names}
MEGATRON_CORE_WORDS = {
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
NATIVE_WORDS = {core_word: word for word, core_word in MEGATRON_CORE_WORDS.items()} | {
    "encoder": "transformer",  # the name since v2.6
    "input_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "final_norm": "final_layernorm",
}
SKIPPED_WORDS = ("module", "language_model", "embedding")
# {name of a layer norm in Megatron Core: its name with Transformer Engine and in torch_dist}
FUSED = {
    ".input_layernorm.": ".self_attention.linear_qkv.layer_norm_",
    ".pre_mlp_layernorm.": ".mlp.linear_fc1.layer_norm_",
}
# Arguments that change the model's formula. A GPT-2 has None, False or no value.
UNSUPPORTED_ARGS = (
    "apply_residual_connection_post_layernorm",
    "swiglu",
    "squared_relu",
    "quick_geglu",
    "apply_layernorm_1p",
    "untie_embeddings_and_output_weights",
    "num_experts",
    "multi_latent_attention",
    "qk_layernorm",
    "use_mup",
)
MODEL_FLOATS = ("attention_dropout", "hidden_dropout", "init_method_std", "layernorm_epsilon")
TRAIN_ARGS = ("micro_batch_size", "seed")
PIPELINE_FLAG, VIRTUAL_FLAG = "--pipeline-model-parallel-size", "--num-layers-per-virtual-pipeline-stage"
WITH_PIPELINE = ("megatron-v2", "megatron-v3", "megatron-core")
Specs = Mapping[str, PartitionSpec]
RankState = tuple[object, Mapping[str, LazyTensors]]  # (a rank's file, its tensors by kind and our name)


# --- names


def native_name(name: str) -> str:
    """Return our name of the parameter that any version of Megatron calls `name`."""
    for plain, fused in FUSED.items():
        name = name.replace(fused, plain)
    return ".".join(NATIVE_WORDS.get(word, word) for word in name.split(".") if word not in SKIPPED_WORDS)


def core_name(name: str) -> str:
    """Return Megatron Core's name of the parameter `name`, such as decoder.layers.3.self_attention.linear_proj.bias."""
    return ".".join(MEGATRON_CORE_WORDS.get(word, word) for word in name.split("."))


def format_state_dict(format: str, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Convert `tensors`, which have our names, to a state dict of `format`."""
    if format == "megatron-2019":
        return dict(tensors)
    if format == "megatron-core":
        return {core_name(name): tensor for name, tensor in tensors.items()}
    # megatron-v2 has the names of v2.0. v2.6 and v3 also read names of v2.0, but write different names.
    body, attention = ("encoder", ".self_attention.") if format == "megatron-v3" else ("transformer", ".attention.")
    model: dict[str, Any] = {}
    for name, tensor in tensors.items():
        module, rest = name.replace(".attention.", attention).split(".", 1)
        path = ["language_model", body] if module == "transformer" else ["language_model", "embedding", module]
        inner = model
        for key in [module] if name == EMBEDDINGS_FOR_HEAD else path:
            inner = inner.setdefault(key, {})
        inner[rest] = tensor
    return model


# --- ranks


@dataclass(frozen=True)
class MegatronLayout:
    """The parallel layout of an export: tensor and pipeline sizes.

    first: the number of layers of the first stage, if it differs from the middle stages.
    last: the number of layers of the last stage, if it differs from the middle stages.
    virtual_layers: the number of layers of a chunk, if stages are interleaved.
    """

    tensor: int = 1
    pipeline: int = 1
    virtual_layers: int | None = None
    first: int | None = None
    last: int | None = None

    def virtual(self, num_layers: int) -> int:
        """Return the number of chunks of layers per stage. Raises ValueError, which names the flag, if the sizes do not
        fit `num_layers`."""
        return 1 if self.virtual_layers is None else num_model_chunks(num_layers, self.pipeline, self.virtual_layers)


def chunks_of_stages(model: ModelConfig, layout: MegatronLayout, format: str) -> list[list[dict[str, str]]]:
    """Return the chunks of layers of each stage. A chunk is {parameter name in the chunk: our parameter name}. In a
    chunk, layers are numbered from 0.

    With several stages, the last stage also has the word embeddings, as `EMBEDDINGS_FOR_HEAD`. Raises ValueError, which
    names the flag, for a layout that this format does not support.
    """
    pp_size, vpp_size, core = layout.pipeline, layout.virtual(model.num_layers), format == "megatron-core"
    least = 2 if core else 3
    require(pp_size > 0, f"{PIPELINE_FLAG} must be positive, not {pp_size}")
    require(
        pp_size == 1 or format in WITH_PIPELINE,
        f"{PIPELINE_FLAG} {pp_size}: {format} has no pipeline; use {', '.join(WITH_PIPELINE)}",
    )
    require(vpp_size == 1 or pp_size >= least, f"{VIRTUAL_FLAG} needs {PIPELINE_FLAG} of at least {least} in {format}")
    require(
        core or (layout.first is None and layout.last is None),
        f"{FIRST_LAYERS_FLAG} and {LAST_LAYERS_FLAG}: only megatron-core has stages of different sizes, not {format}",
    )
    layers = layers_of_virtual_stages(model.num_layers, pp_size, vpp_size, layout.first, layout.last)
    # the numbers of layers of the chunks, by stage
    sizes = [list(map(len, layers[stage::pp_size])) for stage in range(pp_size)]
    middle = sizes[layout.first is not None : pp_size - (layout.last is not None)]
    is_even = all(min(chunks) == max(chunks) for chunks in sizes) and all(chunks == middle[0] for chunks in middle)
    advice = f": give {FIRST_LAYERS_FLAG} and {LAST_LAYERS_FLAG}" if core else ""
    require(
        is_even,
        f"{PIPELINE_FLAG} {pp_size} does not divide the {model.num_layers} layers into equal chunks, as Megatron "
        f"requires{advice}",
    )
    chunks: list[dict[str, str]] = [{} for _ in layers]
    for name in model_partition_specs(model):
        if layer := LAYER.fullmatch(name):
            chunk = next(chunk for chunk, layer_range in enumerate(layers) if int(layer[1]) in layer_range)
            chunks[chunk][f"transformer.layers.{int(layer[1]) - layers[chunk].start}.{layer[2]}"] = name
        else:
            chunks[-1 if name.startswith("transformer.") else 0][name] = name
    if pp_size > 1:
        chunks[-1][EMBEDDINGS_FOR_HEAD] = TIED_WEIGHT
    return [chunks[stage::pp_size] for stage in range(pp_size)]


def merge_ranks(
    ranks: Sequence[RankState], specs: Specs, tp_size: int, order: Callable[[Tensor], Tensor] | None = None
) -> TensorsByKind:
    """Merge the shards of all ranks. Return the tensors by kind (model, master, ...) and our name.

    order: permutes a rank's QKV rows to our order.

    Raises ValueError, which names the file, if a shard is missing or has a wrong shape, or if ranks have different
    values of a replicated parameter or of the word embeddings.
    """
    merged: TensorsByKind = {kind: {} for kind in ranks[0][1]}
    for kind, made in merged.items():
        for name, spec in specs.items():
            shards = [(file, states[kind][name]) for file, states in ranks if name in states[kind]]
            problem = f"{kind}.{name} is in {plural(len(shards), 'file')} instead of {tp_size}: are two runs mixed?"
            require(len(shards) == tp_size, problem)
            (origin, first), shape = shards[0], spec.local_shape(tp_size)
            for file, part in shards:
                label = f"{file}: {kind}.{name}"
                require(part.info.shape == shape, f"{label} has shape {part.info.shape} instead of {shape}")
                is_same = part.info == first.info if spec.dim is not None else part.equal(first)
                require(is_same, f"{label} should be equal on all ranks and differs from {origin}: are two runs mixed?")
            parts = [part.map(order) if order and ".query_key_value." in name else part for _, part in shards]
            made[name] = LazyTensor.combine(spec.merge, parts)
        tables, copies = (
            [(file, states[kind][name]) for file, states in ranks if name in states[kind]]
            for name in (TIED_WEIGHT, EMBEDDINGS_FOR_HEAD)
        )
        for (file, copy), (origin, table) in zip(copies, tables, strict=False):
            require(
                copy.equal(table),
                f"{file}: {kind}.{EMBEDDINGS_FOR_HEAD} differs from the word embeddings of {origin}, and this "
                "program's GPT-2 ties them: are two runs mixed?",
            )
    return merged


def read_shard(source: BaseCheckpoint, name: str, spec: PartitionSpec, kind: str, rank: int, tp_size: int) -> Tensor:
    """Read a rank's shard of a parameter. Padding rows repeat the last true row, as in Megatron's converter. Megatron's
    softmax includes padding rows, and rows of zeros would have logits of 0, which are often the largest. Moments of
    padding rows are 0."""
    full_name = f"{kind}.{name}"
    local = torch.zeros(spec.local_shape(tp_size), dtype=source.tensors[full_name].dtype)
    own = spec.without_padding(local, rank, tp_size)
    source.read_into(own, full_name, spec.local_slice(rank, tp_size).offset)
    if len(own) < len(local) and kind not in MOMENTS:
        rows, width = spec.global_shape
        local[len(own) :] = source.read(full_name, (rows - 1, 0), (1, width))
    return local


# --- arguments and shape


def namespace_dict(value: Any) -> dict[str, Any]:
    """Return the attributes of a namespace or the entries of a dictionary. Return {} for other values."""
    return value if isinstance(value, dict) else value.attributes() if isinstance(value, PickledObject) else {}


def saved_iteration(top: Entries) -> int:
    """Return the iteration in a file, or 0 if the file has none. Raises ValueError if the number is not an integer."""
    name = next((name for name in ("iteration", "total_iters", "global_steps") if name in top), "")
    return check_integer(name, top.get(name, 0), 0, 10**12)


def infer_model_config(
    top: Entries,
    shapes: Mapping[str, tuple[int, ...]],
    file_sizes: Mapping[str, int],
    hints: Hints,
    log: Log,
    tp_size: int = 1,
) -> tuple[ModelConfig, ModelConfig]:
    """Return the model's configuration, once with the true vocabulary size and once with the padded one. If the true
    size is unknown, the padded size is used, and `log` gets a line.

    top: the file's other entries, such as "args".
    shapes: the shapes by our names, of one of `tp_size` ranks.
    file_sizes: {name of an argument: the value that follows from the files}.

    Raises ValueError, in one line, if files, arguments and hints contradict each other.
    """
    args, shape = namespace_dict(top.get("args")), partial(matrix_shape, shapes)
    for name in UNSUPPORTED_ARGS:
        require(not args.get(name), f"was trained with {name}, which this program's GPT-2 does not compute")
    (rows, hidden_size), (positions, _) = shape(TIED_WEIGHT), shape("position_embeddings.weight")
    ffn, padded = shape("transformer.layers.0.mlp.dense_h_to_4h.weight")[0] * tp_size, rows * tp_size
    qkv_rows, _ = shape("transformer.layers.0.attention.query_key_value.weight")
    require(
        qkv_rows * tp_size == 3 * hidden_size,
        f"was written by {3 * hidden_size / max(qkv_rows, 1):g} ranks, but has the files of {tp_size}: is a file "
        "missing?",
    )
    num_layers = len({match[1] for name in shapes if (match := LAYER.fullmatch(name))})
    sizes = {**file_sizes, "num_layers": num_layers, "hidden_size": hidden_size, "padded_vocab_size": padded}
    for name, size in sizes.items():
        saved = args.get(name)
        is_same = not isinstance(saved, int) or saved == size
        require(is_same, f"{name} is {saved} by its arguments and {size} by its files: are two runs mixed?")
    true_size, flag_size = top.get(TRUE_VOCAB_SIZE), hints.vocab_size
    for label, vocab_size in ((TRUE_VOCAB_SIZE, true_size), ("--vocab-size", flag_size)):
        fits = vocab_size is None or (type(vocab_size) is int and 0 < vocab_size <= padded)
        require(fits, f"{label} {short_repr(vocab_size)}: it holds {padded} rows, padding included")
    fields = {name: args[name] for name in MODEL_FLOATS if args.get(name) is not None}
    if args.get("norm_epsilon"):  # Layer norms have this argument since 2023.
        fields["layernorm_epsilon"] = args["norm_epsilon"]
    divisor = args.get("make_vocab_size_divisible_by") or 128
    if true_size is None and flag_size is None:
        report_padding(padded, log)
        divisor = 1
    # Megatron of 2019 has only the tanh form. Later versions use tanh in the fused kernel, and otherwise erf.
    tanh = "openai_gelu" not in args or args["openai_gelu"] or args.get("bias_gelu_fusion")
    model = ModelConfig(
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_attention_heads=infer_num_heads(hidden_size, tp_size, args.get("num_attention_heads"), hints),
        ffn_hidden_size=None if ffn == 4 * hidden_size else ffn,
        max_position_embeddings=positions,
        vocab_size=true_size or flag_size or padded,
        make_vocab_size_divisible_by=divisor,
        gelu=hints.gelu or ("tanh" if tanh else "erf"),
        **fields,
    )
    padded_model = dataclasses.replace(model, vocab_size=padded, make_vocab_size_divisible_by=1)
    specs = model_partition_specs(padded_model)
    for name in sorted(shapes.keys() ^ specs.keys()):
        problem = f"holds no {name}" if name in specs else f"holds {name[:120]}, which is not a part of a GPT-2"
        raise ValueError(f"{problem}: is a pipeline stage missing, or is it another model?")
    return model, padded_model


def padded_model_config(source: BaseCheckpoint, tp_size: int) -> ModelConfig:
    """Return the configuration with Megatron's padding of the vocabulary. Megatron pads to a multiple of the product of
    `make_vocab_size_divisible_by` and the tensor-parallel size, this project to a multiple of each of the two."""
    model = check_metadata(source)
    require(
        model.num_attention_heads % tp_size == 0 and model.ffn_size % tp_size == 0,
        f"{source.path}: --tensor-model-parallel-size {tp_size} does not divide its {model.num_attention_heads} heads "
        f"and MLP width of {model.ffn_size}",
    )
    return dataclasses.replace(model, make_vocab_size_divisible_by=model.make_vocab_size_divisible_by * tp_size)


def run_entries(source: BaseCheckpoint, model: ModelConfig, layout: MegatronLayout, format: str) -> dict[str, Any]:
    """Return the entries of a checkpoint that describe the run, with its `args`. Megatron compares the entries with its
    flags, or uses them instead of flags."""
    entries: dict[str, Any] = {"iteration": source.iteration, TRUE_VOCAB_SIZE: source.metadata["vocab_size"]}
    if format == "megatron-2019":
        return entries
    metadata, tp_size, vpp_size = source.metadata, layout.tensor, layout.virtual(model.num_layers)
    sizes = ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")
    flags = {**metadata["config"].get("optimizer", {}), **metadata["config"].get("train", {})}
    kind = (metadata.get("tokenizer") or {}).get("kind")
    args: dict[str, Any] = {
        **{name: getattr(model, name) for name in (*sizes, *MODEL_FLOATS)},
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
        "tokenizer_type": kind if kind == "SentencePieceTokenizer" else "GPT2BPETokenizer",
        "make_vocab_size_divisible_by": model.make_vocab_size_divisible_by // tp_size,
        "padded_vocab_size": model_partition_specs(model, tp_size)[TIED_WEIGHT].padded_size,
        "tensor_model_parallel_size": tp_size,
        "pipeline_model_parallel_size": layout.pipeline,
        "virtual_pipeline_model_parallel_size": vpp_size if vpp_size > 1 else None,
        "num_layers_per_virtual_pipeline_stage": layout.virtual_layers if vpp_size > 1 else None,
        "params_dtype": source.tensors[f"model.{TIED_WEIGHT}"].dtype,
        "iteration": source.iteration,
        "consumed_train_samples": metadata.get("consumed_samples") or 0,
        **{name: metadata[name] for name in ("global_batch_size", "train_iters") if metadata.get(name)},
        **{name: flags[name] for name in ("clip_grad", *TRAIN_ARGS) if name in flags},
    }
    if format == "megatron-core":
        args |= {"decoder_first_pipeline_num_layers": layout.first, "decoder_last_pipeline_num_layers": layout.last}
    if format == "megatron-v3":
        args["transformer_impl"] = "local"
    return {**entries, "args": argparse.Namespace(**args), "checkpoint_version": 3.0}
