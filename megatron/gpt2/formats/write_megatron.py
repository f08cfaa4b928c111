"""Checkpoints as Megatron writes them: in 2019's form, in those of v2 and v3, and under the names of Megatron Core.

This and write_nanogpt.py are the places that call torch.save: these files are pickles by definition. torch.save wants
all tensors of a rank at once. They wait for it on the disk, so that one at a time is in memory.

Legend: n heads, d head size, p model-parallel size.
"""

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.gpt2.checkpoint.folder import TRACKER
from megatron.gpt2.checkpoint.source import Source, check_facts
from megatron.gpt2.config import ModelConfig, require
from megatron.gpt2.formats.foreign import TRUE_VOCABULARY, by_part, renamed
from megatron.gpt2.formats.megatron_files import HEAD
from megatron.gpt2.formats.megatron_layout import Layout, chunks_of_stages
from megatron.gpt2.formats.new_folder import new_folder
from megatron.gpt2.formats.write_megatron_optimizer import optimizer_2019, optimizer_later, schedule
from megatron.gpt2.model.parameters import parameter_specs
from megatron.gpt2.optimizer.optimizer import MOMENTS

CORE_MODULES = {
    "word_embeddings": "embedding.word_embeddings",
    "position_embeddings": "embedding.position_embeddings",
    "transformer.final_layernorm": "decoder.final_layernorm",
    "word_embeddings_for_head": "output_layer",
}
CORE_LAYER_MODULES = {
    "input_layernorm": "input_layernorm",
    "attention.query_key_value": "self_attention.linear_qkv",
    "attention.dense": "self_attention.linear_proj",
    "post_attention_layernorm": "pre_mlp_layernorm",
    "mlp.dense_h_to_4h": "mlp.linear_fc1",
    "mlp.dense_4h_to_h": "mlp.linear_fc2",
}
MASTERS = ("master", *MOMENTS)


def write_megatron(
    source: Source, out: str | Path, format: str, layout: Layout | None = None, *, log: Callable[[str], None] = print
) -> Path:
    """Write `source` into the new folder `out`, in the format "megatron-2019", "megatron-v2", "megatron-v3" or
    "megatron-core", in files for the ranks of `layout`; returns the iteration's folder.

    Masters, moments, loss scaler and schedule are written where the source holds them, except for megatron-core, which
    gets weights alone. ValueError for a layout that does not fit.
    """
    layout = layout or Layout()
    p, model = layout.tensor, padded_model(source, layout.tensor)
    stages, specs = chunks_of_stages(model, layout, format), parameter_specs(model, p)
    with_optimizer = format != "megatron-core" and has_optimizer(source)
    top: dict[str, Any] = {"iteration": source.iteration}
    if format != "megatron-2019":
        top |= {"args": arguments(source, model, layout, format), "checkpoint_version": 3.0}
    if with_optimizer:
        name = "opt_param_scheduler" if format == "megatron-v3" else "lr_scheduler"
        top[name] = schedule(source, format, log)
        if format == "megatron-2019":
            log("the loss scaler is written as a plain dictionary: 2019's class is not ours to pickle")

    def rank_file(rank: int, stage: int, folder: Path) -> dict[str, Any]:
        def shard(kind: str, name: str) -> Tensor:
            """The rank's part. Rows of padding repeat the last true one, as Megatron's own converter does: its softmax
            counts them, and beside logits far below 0 those of zero rows would take nearly all."""
            spec, full_name = specs[name], f"{kind}.{name}"
            local = torch.zeros(spec.local_shape(p), dtype=source.tensors[full_name].dtype)
            own = spec.true_part(local, rank, p)
            source.read_into(own, full_name, spec.box(rank, p).offset)
            if len(own) < len(local) and kind not in MOMENTS:
                rows, width = spec.global_shape
                local[len(own) :] = source.read(full_name, (rows - 1, 0), (1, width))
            if format == "megatron-2019" and ".query_key_value." in name:
                local = by_part(model.num_attention_heads // p)(local)
            return on_disk(local, folder)

        chunks = [{theirs: shard("model", name) for theirs, name in names.items()} for names in stages[stage]]
        models = {
            "model" if len(chunks) == 1 else f"model{number}": in_form(format, chunk)
            for number, chunk in enumerate(chunks)
        }
        if not with_optimizer:
            return {**top, **models}
        # Without names, in the order of the model: what decays, then what does not.
        groups = [
            [
                {kind: shard(kind, name) for kind in MASTERS}
                for names in stages[stage]
                for name in names.values()
                if (len(specs[name].global_shape) > 1) == decays
            ]
            for decays in (True, False)
        ]
        optimizer = optimizer_2019(source, groups) if format == "megatron-2019" else optimizer_later(source, groups)
        return {**top, **models, "optimizer": optimizer}

    return _write(source, out, rank_file, layout)


def has_optimizer(source: Source) -> bool:
    """Whether `source` holds masters and moments."""
    return set(MASTERS) <= {name.partition(".")[0] for name in source.names()}


def in_form(format: str, held: dict[str, Tensor]) -> dict[str, Any]:
    """A model's tensors, by 2019's names, as Megatron of this format keeps them."""
    if format == "megatron-2019":
        return held
    if format == "megatron-core":
        return {core_name(name): tensor for name, tensor in held.items()}
    # megatron-v2 has v2.0's names: v2.6, which writes others, and v3 read them too.
    later = format == "megatron-v3"
    language_model: dict[str, Any] = {"embedding": {}, "encoder" if later else "transformer": {}}
    nested: dict[str, Any] = {"language_model": language_model}
    for name, tensor in held.items():
        module, _, rest = name.partition(".")
        if module == "transformer":
            rest = rest.replace(".attention.", ".self_attention.") if later else rest
            language_model["encoder" if later else "transformer"][rest] = tensor
        elif name == HEAD:
            nested[module] = {rest: tensor}
        else:
            language_model["embedding"][module] = {rest: tensor}
    if not language_model["embedding"]:
        del language_model["embedding"]
    return nested


def core_name(name: str) -> str:
    """transformer.layers.3.attention.dense.bias -> decoder.layers.3.self_attention.linear_proj.bias."""
    return renamed(name, CORE_MODULES, "decoder.layers", CORE_LAYER_MODULES)


def arguments(source: Source, model: ModelConfig, layout: Layout, format: str) -> argparse.Namespace:
    """What Megatron compares with its own flags, or takes in their place."""
    facts, p = source.facts, layout.tensor
    chunks = layout.virtual(model.num_layers)
    said: dict[str, Any] = {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.ffn_size,
        "num_attention_heads": model.num_attention_heads,
        "kv_channels": model.hidden_size // model.num_attention_heads,
        "group_query_attention": False,
        "seq_length": model.max_position_embeddings,
        "max_position_embeddings": model.max_position_embeddings,
        "position_embedding_type": "learned_absolute",
        "normalization": "LayerNorm",
        "norm_epsilon": model.layernorm_epsilon,
        "layernorm_epsilon": model.layernorm_epsilon,
        "add_bias_linear": True,
        "swiglu": False,
        "openai_gelu": False,
        "bias_gelu_fusion": model.gelu == "tanh",
        "untie_embeddings_and_output_weights": False,
        "hidden_dropout": model.hidden_dropout,
        "attention_dropout": model.attention_dropout,
        "init_method_std": model.init_method_std,
        "tokenizer_type": "GPT2BPETokenizer",
        "make_vocab_size_divisible_by": model.make_vocab_size_divisible_by // p,
        "padded_vocab_size": parameter_specs(model, p)["word_embeddings.weight"].padded_size,
        "tensor_model_parallel_size": p,
        "pipeline_model_parallel_size": layout.pipeline,
        "virtual_pipeline_model_parallel_size": chunks if chunks > 1 else None,
        "num_layers_per_virtual_pipeline_stage": layout.virtual_layers if chunks > 1 else None,
        "params_dtype": source.tensors["model.word_embeddings.weight"].dtype,
        "iteration": source.iteration,
        "consumed_train_samples": facts.get("consumed_samples") or 0,
    }
    if format == "megatron-core":
        said |= {"decoder_first_pipeline_num_layers": layout.first, "decoder_last_pipeline_num_layers": layout.last}
    if format == "megatron-v3":
        said["transformer_impl"] = "local"
    said |= {name: facts[name] for name in ("global_batch_size", "train_iters") if facts.get(name)}
    said |= {name: value for name, value in facts["config"].get("optimizer", {}).items() if name == "clip_grad"}
    return argparse.Namespace(**said)


def padded_model(source: Source, p: int) -> ModelConfig:
    """The shape, with the padding of the vocabulary that Megatron takes: a multiple of the product, where ours is of
    both numbers."""
    model = check_facts(source)
    require(
        model.num_attention_heads % p == 0 and model.ffn_size % p == 0,
        f"{source.path}: --model-parallel-size {p} does not divide its {model.num_attention_heads} heads and MLP "
        f"width of {model.ffn_size}",
    )
    return dataclasses.replace(model, make_vocab_size_divisible_by=model.make_vocab_size_divisible_by * p)


def on_disk(x: Tensor, folder: Path) -> Tensor:
    """The same values, read from a file that has no name any more: in the page cache where there is room."""
    path = folder / "tensor"
    x.contiguous().view(-1).view(torch.uint8).numpy().tofile(path)
    mapped = torch.from_file(str(path), shared=False, size=x.numel(), dtype=x.dtype).view(x.shape)
    path.unlink()
    return mapped


def _write(
    source: Source, out: str | Path, rank_file: Callable[[int, int, Path], dict[str, Any]], layout: Layout
) -> Path:
    """All ranks' files and the tracker, or nothing. rank_file: what a file holds, by model-parallel rank, pipeline
    stage and a folder to work in."""
    with new_folder(out) as folder:
        iteration = folder / f"iter_{source.iteration:07d}"
        for rank in range(layout.tensor):
            for stage in range(layout.pipeline):
                name = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if layout.pipeline > 1 else "")
                path = iteration / name / "model_optim_rng.pt"
                path.parent.mkdir(parents=True)
                held = rank_file(rank, stage, path.parent)
                torch.save({**held, TRUE_VOCABULARY: source.facts["vocab_size"]}, path)
        (folder / TRACKER).write_text(f"{source.iteration}")
    return Path(out) / iteration.name
