"""Checkpoints as Megatron writes them: in 2019's form, with Adam's state, and under the names of Megatron Core.

This is the one place that calls torch.save: these files are pickles by definition. torch.save wants all tensors of a
rank at once. They wait for it on the disk, so that one at a time is in memory.

Legend: n heads, d head size, p model-parallel size.
"""

import argparse
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.gpt2.checkpoint.facts import check_facts
from megatron.gpt2.checkpoint.folder import TRACKER
from megatron.gpt2.checkpoint.source import Source
from megatron.gpt2.config import Config, ModelConfig, OptimizerConfig, require
from megatron.gpt2.formats.foreign import TRUE_VOCABULARY, by_part, renamed
from megatron.gpt2.formats.new_folder import new_folder
from megatron.gpt2.model.gpt2 import parameter_specs
from megatron.gpt2.optimizer.optimizer import MOMENTS

CORE_MODULES = {"word_embeddings": "embedding.word_embeddings", "position_embeddings": "embedding.position_embeddings",
                "transformer.final_layernorm": "decoder.final_layernorm"}
CORE_LAYER_MODULES = {
    "input_layernorm": "input_layernorm", "attention.query_key_value": "self_attention.linear_qkv",
    "attention.dense": "self_attention.linear_proj", "post_attention_layernorm": "pre_mlp_layernorm",
    "mlp.dense_h_to_4h": "mlp.linear_fc1", "mlp.dense_4h_to_h": "mlp.linear_fc2"}


def write_megatron_2019(source: Source, out: str | Path, *, model_parallel_size: int,
                        log: Callable[[str], None] = print) -> Path:
    """Write `source` into the new folder `out` in 2019's form; returns the iteration's folder.

    Names are flat, QKV is [3, n/p, d] on each rank. Masters and moments are written where the source holds them.
    ValueError for a size that does not fit.
    """
    qkv = by_part(_model(source, model_parallel_size).num_attention_heads // model_parallel_size)
    with_optimizer = all(any(name.startswith(f"{kind}.") for name in source.names()) for kind in ("master", *MOMENTS))
    schedule = _schedule(source, log) if with_optimizer else None

    def rank_file(rank: int, folder: Path) -> dict[str, Any]:
        def shards(kind: str) -> dict[str, Tensor]:
            return {name: _on_disk(qkv(tensor) if ".query_key_value." in name else tensor, folder)
                    for name, tensor in _shards(source, kind, rank, model_parallel_size)}

        model = shards("model")
        top: dict[str, Any] = {"iteration": source.iteration, "model": model}
        if with_optimizer:
            groups = [[name for name, tensor in model.items() if (tensor.dim() > 1) == decays]
                      for decays in (True, False)]
            top["optimizer"] = _optimizer_2019(source, groups, {kind: shards(kind) for kind in ("master", *MOMENTS)})
            top["lr_scheduler"] = schedule
        return top

    if with_optimizer:
        log("the loss scaler is written as a plain dictionary: 2019's class is not ours to pickle")
    return _write(source, out, rank_file, model_parallel_size)


def write_megatron_core(source: Source, out: str | Path, *, model_parallel_size: int,
                        log: Callable[[str], None] = print) -> Path:
    """Write the weights of `source` into the new folder `out`, in Megatron Core's `torch` format; returns the
    iteration's folder.

    Layer norms stand beside the linear layers, and `args` describes the model. ValueError for a size that does not fit.
    """
    model = _model(source, model_parallel_size)
    specs = parameter_specs(model, model_parallel_size)
    facts = source.facts
    args = argparse.Namespace(
        num_layers=model.num_layers, hidden_size=model.hidden_size, ffn_hidden_size=model.ffn_size,
        num_attention_heads=model.num_attention_heads, kv_channels=model.hidden_size // model.num_attention_heads,
        group_query_attention=False, seq_length=model.max_position_embeddings,
        max_position_embeddings=model.max_position_embeddings, position_embedding_type="learned_absolute",
        normalization="LayerNorm", norm_epsilon=model.layernorm_epsilon, layernorm_epsilon=model.layernorm_epsilon,
        add_bias_linear=True, swiglu=False, openai_gelu=False, bias_gelu_fusion=model.gelu == "tanh",
        untie_embeddings_and_output_weights=False, hidden_dropout=model.hidden_dropout,
        attention_dropout=model.attention_dropout, init_method_std=model.init_method_std,
        make_vocab_size_divisible_by=model.make_vocab_size_divisible_by // model_parallel_size,
        padded_vocab_size=specs["word_embeddings.weight"].padded_size,
        tensor_model_parallel_size=model_parallel_size, pipeline_model_parallel_size=1,
        params_dtype=source.tensors["model.word_embeddings.weight"].dtype, iteration=source.iteration,
        consumed_train_samples=facts.get("consumed_samples") or 0)

    def rank_file(rank: int, folder: Path) -> dict[str, Any]:
        return {"args": args, "checkpoint_version": 3.0, "iteration": source.iteration,
                "model": {core_name(name): _on_disk(tensor, folder)
                          for name, tensor in _shards(source, "model", rank, model_parallel_size)}}

    return _write(source, out, rank_file, model_parallel_size)


def core_name(name: str) -> str:
    """transformer.layers.3.attention.dense.bias -> decoder.layers.3.self_attention.linear_proj.bias."""
    return renamed(name, CORE_MODULES, "decoder.layers", CORE_LAYER_MODULES)


def _model(source: Source, p: int) -> ModelConfig:
    """The shape, with the padding of the vocabulary that Megatron takes: a multiple of the product, where ours is of
    both numbers."""
    model = check_facts(source)
    require(model.num_attention_heads % p == 0 and model.ffn_size % p == 0,
            f"{source.path}: --model-parallel-size {p} does not divide its {model.num_attention_heads} heads and MLP "
            f"width of {model.ffn_size}")
    return dataclasses.replace(model, make_vocab_size_divisible_by=model.make_vocab_size_divisible_by * p)


def _shards(source: Source, kind: str, rank: int, p: int) -> Iterator[tuple[str, Tensor]]:
    """A rank's part of each parameter, padding as zeros, in the order of the model."""
    for name, spec in parameter_specs(_model(source, p), p).items():
        local = torch.zeros(spec.local_shape(p), dtype=source.tensors[f"{kind}.{name}"].dtype)
        source.read_into(spec.true_part(local, rank, p), f"{kind}.{name}", spec.box(rank, p).offset)
        yield name, local


def _on_disk(x: Tensor, folder: Path) -> Tensor:
    """The same values, read from a file that has no name any more: in the page cache where there is room."""
    path = folder / "tensor"
    x.contiguous().view(-1).view(torch.uint8).numpy().tofile(path)
    mapped = torch.from_file(str(path), shared=False, size=x.numel(), dtype=x.dtype).view(x.shape)
    path.unlink()
    return mapped


def _optimizer_2019(source: Source, groups: list[list[str]], states: Mapping[str, Mapping[str, Tensor]]) -> Any:
    facts, config = source.facts["optimizer"], _optimizer_config(source)
    scaler = facts["loss_scaler"]
    clean_steps = int(scaler.get("clean_steps", 0))
    numbers = {name: number for number, name in enumerate(name for names in groups for name in names)}
    return {
        "loss_scaler": {
            "cur_scale": float(scaler["scale"]), "cur_iter": source.iteration,
            "last_overflow_iter": source.iteration - clean_steps - 1, "scale_factor": 2.0,
            "scale_window": config.loss_scale_window, "min_scale": config.min_loss_scale,
            "delayed_shift": config.hysteresis, "consecutive_hysteresis": False,
            "cur_hysteresis": int(scaler.get("hysteresis_left", config.hysteresis))},
        "dynamic_loss_scale": "clean_steps" in scaler, "overflow": False, "first_closure_call_this_step": True,
        "optimizer_state_dict": {
            "state": {number: {moment: states[moment][name] for moment in MOMENTS}
                      for name, number in numbers.items()},
            "param_groups": [{"params": [numbers[name] for name in names], "weight_decay": weight_decay,
                              "lr": config.lr, "betas": (config.adam_beta1, config.adam_beta2),
                              "eps": config.adam_eps, "bias_correction": True, "step": facts["adam_steps"]}
                             for names, weight_decay in zip(groups, (config.weight_decay, 0.0), strict=True)]},
        "fp32_from_fp16": [[states["master"][name] for name in names] for names in groups]}


def _optimizer_config(source: Source) -> OptimizerConfig:
    return Config.from_dict({"optimizer": source.facts["config"].get("optimizer", {})}).optimizer


def _schedule(source: Source, log: Callable[[str], None]) -> dict[str, Any] | None:
    """2019's `lr_scheduler`."""
    config = _optimizer_config(source)
    end = config.lr_decay_iters or source.facts.get("train_iters") or source.iteration
    warmup = config.warmup * end if config.lr_warmup_iters is None else config.lr_warmup_iters
    style = {"cosine-2019": "cosine"}.get(config.lr_decay_style, config.lr_decay_style)
    if style == "WSD":
        log("left out: the schedule: 2019's Megatron has no WSD")
        return None
    if style == config.lr_decay_style and style != "constant":
        log(f"the {style} schedule travels by its name and numbers: 2019's formula is close to today's, not equal")
    return {"start_lr": config.lr, "warmup_iter": warmup, "num_iters": source.facts["optimizer"]["good_steps"],
            "decay_style": style, "end_iter": end, "min_lr": config.min_lr}


def _write(source: Source, out: str | Path, rank_file: Callable[[int, Path], dict[str, Any]], p: int) -> Path:
    """All ranks' files and the tracker, or nothing. rank_file: what a rank's file holds, by its number and a folder
    to work in."""
    with new_folder(out) as folder:
        iteration = folder / f"iter_{source.iteration:07d}"
        for rank in range(p):
            path = iteration / f"mp_rank_{rank:02d}" / "model_optim_rng.pt"
            path.parent.mkdir(parents=True)
            torch.save({**rank_file(rank, path.parent), TRUE_VOCABULARY: source.facts["vocab_size"]}, path)
        (folder / TRACKER).write_text(f"{source.iteration}")
    return Path(out) / iteration.name
