"""With a sharded optimizer the parameters that other ranks have updated come in buckets while the next forward runs."""

from collections import defaultdict
from collections.abc import Iterable

import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron.gpt2.model.gpt2 import GPT2Model
from megatron.gpt2.optimizer.flat_parameters import FlatParameters
from mpu.mappings import all_gather_single


class ParameterGatherer:
    """Fetches the parameters that other ranks' optimizers own, bucket by bucket, while the model already computes.

    `launch` starts all the all-gathers, in the order in which forward needs them: the buffer's from its end. The
    model waits before its embeddings for whatever lies outside of its layers, and before each layer for the buckets
    that hold a part of it. Whoever else reads parameters calls `wait` first. Nothing happens unless `flat` is sharded.
    """

    def __init__(self, flat: FlatParameters, model: GPT2Model, group: ProcessGroup | None) -> None:
        self._flat, self._group = flat, group
        self._works: dict[int, dist.Work] = {}  # by bucket, of those that nobody waited for yet
        if not flat.is_sharded:
            return
        needed: defaultdict[int | None, list[int]] = defaultdict(list)  # by layer, None: outside of them
        for index, bucket in reversed(list(enumerate(flat.buckets))):
            for layer in {_layer_of(name) for name in bucket.names}:
                needed[layer].append(index)
        model.register_forward_pre_hook(lambda module, args: self.wait(needed[None]))
        # No hook of the layer, which would become a part of what torch.compile makes of it.
        model.transformer.layer_pre_hook = lambda layer: self.wait(needed[layer])

    def launch(self) -> None:
        """Start all the all-gathers, after `flat.write_back`. On a GPU they follow it on the device, and the host waits
        for nothing."""
        self.wait()
        if self._flat.is_sharded:
            for index, bucket in reversed(list(enumerate(self._flat.buckets))):
                work = all_gather_single(
                    self._flat.params[bucket.range],
                    self._flat.params[self._flat.owned_part(bucket)],
                    group=self._group,
                    async_op=True,
                )
                assert work is not None
                self._works[index] = work

    def wait(self, buckets: Iterable[int] | None = None) -> None:
        """Wait until these buckets (default: all) are complete."""
        for index in list(self._works) if buckets is None else buckets:
            if (work := self._works.pop(index, None)) is not None:
                work.wait()


def _layer_of(name: str) -> int | None:
    """The number in "transformer.layers.<number>.<...>", None for any other parameter."""
    path = name.split(".")
    return int(path[2]) if path[:2] == ["transformer", "layers"] else None
