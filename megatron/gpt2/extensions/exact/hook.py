"""--exact-layouts: what it puts in the place of the plain parts of a run."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

import mpu
from megatron.gpt2.config import Config, require
from megatron.gpt2.extensions.exact.norm import block_of_norm, exact_squared_norm
from megatron.gpt2.extensions.exact.reducer import OF_EMBEDDING, ExactGradientReducer
from megatron.gpt2.extensions.exact.transformer import exact_modules
from megatron.gpt2.hooks import Hook
from megatron.gpt2.model.gpt2 import TIED, GPT2Model
from megatron.gpt2.optimizer.flat_parameters import FlatParameters
from megatron.gpt2.optimizer.gradient_reducer import TiedGradient
from megatron.gpt2.train.setup import PreparedRun
from mpu import kernels


class ExactLayouts(Hook):
    """Layers, reducer and norm whose sums have one order in every layout."""

    contiguous_samples = True
    splits_tied_gradient = True

    def __init__(self, config: Config) -> None:
        assert config.parallel.exact_layouts is not None
        self._parts, self._shape = config.parallel.exact_layouts, config.model

    def check(self, config: Config, device: torch.device) -> None:
        """ValueError where the attention of a GPU would give other numbers in another layout, or in another run."""
        dropout = config.model.attention_dropout
        require(
            dropout == 0 or kernels.attention_takes_keys(device.type),
            f"--exact-layouts and --attention-dropout {dropout:g}: a GPU's attention draws masks that change with the "
            "layout; give --attention-dropout 0, or train on the CPU with --device cpu",
        )

    def decisions(self, prepared: PreparedRun) -> dict[str, str]:
        """The threads of a CPU share a sum: another number of them adds in another order."""
        if prepared.device.type != "cpu":
            return {}
        return {"number of threads (OMP_NUM_THREADS)": str(torch.get_num_threads())}

    def modules(self) -> mpu.Modules:
        """Layers, head and loss in parts."""
        return exact_modules(self._parts)

    def reducer(self, flat: FlatParameters, model: GPT2Model, parallel: mpu.ParallelState) -> ExactGradientReducer:
        """Sums along one tree; the tied matrix has a gradient of the head and one of the embedding."""
        of_embedding = OF_EMBEDDING if model.has_embeddings and model.has_head else TIED
        reducer = ExactGradientReducer(flat, parallel, by_rows=of_embedding if model.has_embeddings else None)
        model.tied_gradient = TiedGradient(reducer, TIED, of_embedding)
        return reducer

    def squared_norm(self, device: torch.device) -> Callable[..., Tensor]:
        """With sums of integers."""
        block = block_of_norm(self._parts, self._shape.hidden_size, self._shape.ffn_size, device=device)
        return functools.partial(exact_squared_norm, block=block)
