"""Opening a trained model to generate text with it or to score text."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

import mpu
from data_utils import Tokenizer, load_tokenizer
from megatron.gpt2.checkpoint.folder import find_checkpoint, refuse_foreign
from megatron.gpt2.checkpoint.reader import Checkpoint
from megatron.gpt2.checkpoint.source import check_facts
from megatron.gpt2.checkpoint.state import load_state, whole_parameters
from megatron.gpt2.model.gpt2 import GPT2Model, layer_config, parameter_specs
from megatron.gpt2.pipeline.schedule import layers_of_stages


@dataclass(frozen=True)
class LoadedModel:
    """A trained model on this rank, with the checkpoint that it comes from and the tokenizer of that checkpoint.

    model: this rank's part, on `device`, in `dtype`, in evaluation mode.
    """

    model: GPT2Model
    tokenizer: Tokenizer
    checkpoint: Checkpoint
    device: torch.device
    dtype: torch.dtype


def load_for_inference(
    directory: str | Path, device: torch.device, dtype: torch.dtype, *, log: Callable[[str], None]
) -> LoadedModel:
    """Load the newest checkpoint of the --save folder `directory`, split over the default model-parallel group,
    its layers over the stages of a pipeline too.

    Every rank of that group calls it. log: takes a line for each damaged checkpoint that is passed over.
    Raises ValueError or FileNotFoundError, in one line, if the folder holds no checkpoint of this project, the
    tokenizer next to it is missing or is another one, or the ranks cannot share the attention heads.
    """
    refuse_foreign(directory, with_tokenizer=True)
    checkpoint = find_checkpoint(directory, log=log)
    if checkpoint is None:
        raise FileNotFoundError(f"--load {directory}: holds no checkpoint; give the --save folder of a training run")
    config = check_facts(checkpoint)
    if checkpoint.facts.get("tokenizer") is None:
        raise ValueError(
            f"{checkpoint.path} came without a tokenizer: convert it again with --vocab-file and "
            "--merge-file, or --tokenizer-model"
        )
    tokenizer = load_tokenizer(Path(directory) / "tokenizer")
    if tokenizer.fingerprint != checkpoint.facts["tokenizer"]["fingerprint"]:
        raise ValueError(
            f"{Path(directory) / 'tokenizer'}: is not the tokenizer that {checkpoint.path} was trained "
            "with; put that one back"
        )
    parallel, heads = mpu.get_parallel_state(), config.num_attention_heads
    ranks = parallel.tensor_model_parallel_size
    if heads % ranks:
        raise ValueError(
            f"--load {directory}: {ranks} ranks cannot share its {heads} attention heads: give a number "
            "that divides them (--nproc-per-node; the scripts: MP_SIZE)"
        )
    stage = layers_of_stages(config.num_layers, parallel.pipeline_model_parallel_size)[
        parallel.pipeline_model_parallel_rank
    ]
    model = GPT2Model(config, layer_config(config, device=device), chunks=[stage])
    load_state(
        whole_parameters(model.named_parameters()),
        parameter_specs(config, ranks),
        checkpoint,
        mp_rank=parallel.tensor_model_parallel_rank,
        mp_size=ranks,
    )
    model = model.to(dtype).eval()
    store_by_column(model)
    return LoadedModel(model, tokenizer, checkpoint, device, dtype)


def store_by_column(model: GPT2Model) -> None:
    """On a CPU, store each float32 matrix of `model` column by column, in place.

    The weights stay the same. The products of a few rows with such a matrix, of which generation is made, are faster.
    """
    for parameter in model.parameters():
        if parameter.dim() == 2 and parameter.device.type == "cpu" and parameter.dtype == torch.float32:
            parameter.data = parameter.data.t().contiguous().t()
