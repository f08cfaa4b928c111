"""Load a trained model to generate or score text."""

from pathlib import Path
from typing import NamedTuple

import torch

import mpu
from data_utils import Tokenizer, load_tokenizer
from data_utils.command_line import Log, require
from megatron.gpt2.checkpoint.interface import check_metadata
from megatron.gpt2.checkpoint.reader import NativeCheckpoint
from megatron.gpt2.checkpoint.save_folder import find_checkpoint, require_native_format
from megatron.gpt2.checkpoint.sharded_state import load_sharded_state_dict, parameter_states
from megatron.gpt2.model.gpt2 import GPT2Model, build_block_config, model_partition_specs
from megatron.gpt2.pipeline.schedule import layers_of_virtual_stages
from mpu.layers import ParallelLinear


class LoadedModel(NamedTuple):
    """A rank's part of a trained model, on `device`, in `dtype` and in evaluation mode, with its checkpoint and
    tokenizer."""

    model: GPT2Model
    tokenizer: Tokenizer
    checkpoint: NativeCheckpoint
    device: torch.device
    dtype: torch.dtype


def load_for_inference(
    directory: str | Path,
    device: torch.device,
    dtype: torch.dtype,
    *,
    log: Log,
) -> LoadedModel:
    """Load the checkpoint that `find_checkpoint` finds in the --save folder `directory`. The model is split over the
    default model-parallel group.

    Every rank of the group calls this function. Raises ValueError or FileNotFoundError if the folder has no checkpoint
    of this project, if the tokenizer next to it is missing or different, or if the ranks cannot share the attention
    heads.

    log: receives a line for each damaged checkpoint that is skipped.
    """
    require_native_format(directory, with_tokenizer=True)
    checkpoint = find_checkpoint(directory, log=log)
    if checkpoint is None:
        raise FileNotFoundError(f"--load {directory}: holds no checkpoint; give the --save folder of a training run")
    config = check_metadata(checkpoint)
    saved, folder = checkpoint.metadata.get("tokenizer"), Path(directory) / "tokenizer"
    if saved is None:
        raise ValueError(
            f"{checkpoint.path} was converted without a tokenizer: convert it again with --vocab-file and "
            "--merge-file, --tokenizer-model or --tokenizer-type"
        )
    tokenizer = load_tokenizer(folder)
    require(
        tokenizer.fingerprint == saved["fingerprint"],
        f"{folder}: is not the tokenizer that {checkpoint.path} was trained with; put that one back",
    )
    parallel, heads = mpu.get_parallel_state(), config.num_attention_heads
    ranks = parallel.tensor_model_parallel_size
    require(
        heads % ranks == 0,
        f"--load {directory}: {ranks} ranks cannot share its {heads} attention heads: give a number that divides them "
        "(--nproc-per-node; the scripts: MP_SIZE)",
    )
    stage = layers_of_virtual_stages(config.num_layers, parallel.pipeline_model_parallel_size)[
        parallel.pipeline_model_parallel_rank
    ]
    model = GPT2Model(config, build_block_config(config, device=device), layer_ranges=[stage])
    load_sharded_state_dict(
        parameter_states(model.named_parameters()),
        model_partition_specs(config, ranks),
        checkpoint,
        tp_rank=parallel.tensor_model_parallel_rank,
        tp_size=ranks,
    )
    model = model.to(dtype).eval()
    store_for_inference(model)
    return LoadedModel(model, tokenizer, checkpoint, device, dtype)


def store_for_inference(model: GPT2Model) -> None:
    """Store the matrices of `model` in the order that its products read fastest, in place; see
    `mpu.weight_for_inference`. The matrices are then no longer parameters, so the model cannot be trained."""
    for module in model.modules():
        if isinstance(module, ParallelLinear):
            weight = mpu.weight_for_inference(module.weight.data)
            del module.weight
            module.register_buffer("weight", weight, persistent=False)
    if model.has_head:
        model.head_weight = mpu.weight_for_inference(model.word_embeddings.weight.data)
        if not model.head_weight.is_mkldnn:
            model.word_embeddings.weight.data = model.head_weight  # one copy in memory
