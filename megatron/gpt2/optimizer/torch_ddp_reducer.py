"""Gradients reduced by torch's own data parallelism (--DDP-impl torch), to compare with."""

import contextlib

from torch import nn
from torch.distributed import ProcessGroup

from megatron.gpt2.optimizer.flat_parameters import FlatParameters
from megatron.gpt2.optimizer.gradient_reducer import sum_partial


class TorchDDPReducer:
    """Does what `GradientReducer` does by `torch.nn.parallel.DistributedDataParallel`, which reduces in the parameters'
    dtype. bucket_size: elements of a bucket; DDP counts in MB of 2^20 bytes. `module` is what forward is called on."""

    def __init__(self, flat: FlatParameters, module: nn.Module, group: ProcessGroup, *, bucket_size: int) -> None:
        self._flat = flat
        self._size = group.size()
        element = flat.params.element_size()
        self.module = nn.parallel.DistributedDataParallel(
            module, process_group=group, broadcast_buffers=False, bucket_cap_mb=max(bucket_size * element >> 20, 1)
        )

    def begin(self, micro_batches: int) -> None:
        """As `GradientReducer.begin`."""
        self._micro_batches = micro_batches

    def forward(self, index: int) -> contextlib.AbstractContextManager[None]:
        """Around the forward of micro-batch `index`: of the last one alone backward sends gradients."""
        return contextlib.nullcontext() if index == self._micro_batches - 1 else self.module.no_sync()

    def finish(self) -> None:
        """Copy the reduced gradients into `flat`, in float32."""
        for name, parameter in self._flat.parameters.items():
            assert parameter.grad is not None, name
            # DDP divides by the ranks; our token weights did so already.
            self._flat.grad(name).copy_(parameter.grad).mul_(self._size)
            parameter.grad = None
        sum_partial(self._flat)
