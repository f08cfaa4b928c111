"""`--exact-layouts`: replaces the layers, the reducer and the gradient norm of a run."""

import functools

import torch

import mpu
from data_utils.command_line import require
from megatron.gpt2.config import Config
from megatron.gpt2.extensions.exact.norm import exact_squared_norm, norm_block_size
from megatron.gpt2.extensions.exact.reducer import EMBEDDING_GRADIENT, ExactBucketReducer
from megatron.gpt2.extensions.exact.transformer import exact_submodules
from megatron.gpt2.hooks import Hook, Numerics
from megatron.gpt2.model.gpt2 import TIED_WEIGHT, GPT2Model
from megatron.gpt2.optimizer.bucket_reducer import TiedGradAccumulator
from megatron.gpt2.optimizer.param_and_grad_buffer import ParamAndGradBuffer
from megatron.gpt2.train.setup import RunContext
from mpu import kernels


class ExactLayouts(Hook):
    """Bitwise-reproducible layouts: every sum of a training step has the same order in every layout."""

    def __init__(self, config: Config) -> None:
        assert config.parallel.exact_layouts is not None
        self._virtual_ranks, self._shape = config.parallel.exact_layouts, config.model

    def validate(self, config: Config, device: torch.device) -> None:
        """Raise ValueError if attention dropout on `device` depends on the layout."""
        dropout = config.model.attention_dropout
        require(
            dropout == 0 or kernels.has_seeded_attention(device.type),
            f"--exact-layouts and --attention-dropout {dropout:g}: a GPU's attention draws masks that change with the "
            "layout; give --attention-dropout 0, or train on the CPU with --device cpu",
        )

    def settings_equal_on_all_ranks(self, context: RunContext) -> dict[str, str]:
        """Return the number of threads on a CPU, which decides the order of a sum."""
        if context.device.type != "cpu":
            return {}
        return {"number of threads (OMP_NUM_THREADS)": str(torch.get_num_threads())}

    def numerics(self, device: torch.device) -> Numerics:
        """Return the layers, reducer and norm of --exact-layouts. A batch of matrices could round differently than
        single matrices, and the layout decides which matrices are in a batch."""
        block = norm_block_size(self._virtual_ranks, self._shape.hidden_size, self._shape.ffn_size, device=device)
        norm = functools.partial(exact_squared_norm, block=block)
        return Numerics(
            exact_submodules(self._virtual_ranks),
            build_reducer,
            norm,
            contiguous_samples=True,
            separate_tied_bucket=True,
            batch_matrices=False,
        )


def build_reducer(buffer: ParamAndGradBuffer, model: GPT2Model, parallel: mpu.ParallelState) -> ExactBucketReducer:
    """Return the reducer, and set the model's `tied_grad_sink`. A rank with both the head and the embedding reduces the
    gradients of both separately."""
    embedding_gradient = EMBEDDING_GRADIENT if model.has_embeddings and model.has_head else TIED_WEIGHT
    reducer = ExactBucketReducer(buffer, parallel, by_rows=embedding_gradient if model.has_embeddings else None)
    model.tied_grad_sink = TiedGradAccumulator(reducer, TIED_WEIGHT, embedding_gradient)
    return reducer
