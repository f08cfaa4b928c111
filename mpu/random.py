"""Random streams, which the ranks of a group share or do not share; dropout that draws from them, or whose masks follow
from keys; and activation checkpointing, which repeats them.

    default generator   the same on all ranks of a model-parallel group. It serves the dropout of embeddings and hidden
                        states, which are replicated
    tracker             different on each rank of a model-parallel group. It serves the dropout of attention, whose
                        heads are split, and of hidden states under sequence parallelism

Both follow from the seed and the model-parallel rank alone, as in 2019. A program that wants other numbers on each
data-parallel rank gives each another seed. Everything works on CPU and GPU alike; the "cuda" in some names is of 2019.

A mask of dropout that is given keys does not depend on the layout. It is a function of the seed, the global number of
the sample, the layer, the place in the layer and the position with its channel, or in attention the head, the query and
the key. So it is the same on any number of ranks, in any micro-batch, and when a layer is computed again; nothing about
it is kept or saved. `kernels/dropout.py` is the function.

Legend: b batch, s sequence, h hidden, p model-parallel size, l layers.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.distributed import ProcessGroup

from mpu import kernels
from mpu.host_memory import HostMemory, keeping_arguments
from mpu.initialize import get_tensor_model_parallel_group, get_tensor_model_parallel_rank

MODEL_PARALLEL_RNG = "model-parallel-rng"
_TRACKER_OFFSET = 2718
# The places where a layer drops. The embeddings' dropout belongs to the first layer.
OF_EMBEDDINGS, OF_PROBABILITIES, AFTER_ATTENTION, AFTER_MLP = range(4)

_device: str | None = None  # "cpu" or "cuda": whose generator dropout draws from; None: nobody has said


def _on_gpu() -> bool:
    if _device is not None:
        return _device == "cuda"
    # A process that has not used its GPU draws on the CPU. To ask for the state must not start CUDA.
    return torch.cuda.is_available() and torch.cuda.is_initialized()


def _get_state() -> Tensor:
    return torch.cuda.get_rng_state() if _on_gpu() else torch.get_rng_state()


def _set_state(state: Tensor) -> None:
    (torch.cuda if _on_gpu() else torch).set_rng_state(state)


class RNGStatesTracker:
    """Named streams of random numbers. Inside `fork(name)` the default generator is that stream.

    A state is the one of torch's generator: uint8, of the GPU that the process uses, else of the CPU.
    """

    def __init__(self) -> None:
        self._states: dict[str, Tensor] = {}

    def reset(self) -> None:
        """Remove all streams."""
        self._states.clear()

    def get_states(self) -> dict[str, Tensor]:
        """A copy of the state of each stream, by name."""
        return {name: state.clone() for name, state in self._states.items()}

    def set_states(self, states: dict[str, Tensor]) -> None:
        """Replace all streams by copies of these states."""
        self._states = {name: state.clone() for name, state in states.items()}

    def add(self, name: str, seed: int) -> None:
        """Begin the stream `name` with `seed`. Raises ValueError where it exists."""
        if name in self._states:
            raise ValueError(f"the random stream {name!r} exists already")
        before = _get_state()
        if _on_gpu():
            torch.cuda.manual_seed(seed)
        else:
            torch.default_generator.manual_seed(seed)
        self._states[name] = _get_state()
        _set_state(before)

    @contextlib.contextmanager
    def fork(self, name: str = MODEL_PARALLEL_RNG) -> Iterator[None]:
        """Draw from the stream `name` inside, and go on with the default generator afterwards where it was before.

        Raises KeyError where there is no such stream.
        """
        if name not in self._states:
            raise KeyError(f"no random stream {name!r}: call mpu.model_parallel_cuda_manual_seed first")
        before = _get_state()
        _set_state(self._states[name])
        try:
            yield
        finally:
            self._states[name] = _get_state()
            _set_state(before)


_tracker = RNGStatesTracker()


def get_cuda_rng_tracker() -> RNGStatesTracker:
    """The tracker of this process."""
    return _tracker


def current_rng_tracker() -> RNGStatesTracker:
    """What `mpu.get_cuda_rng_tracker()` gives now. The layers and `checkpoint` use this function.

    A program may replace `mpu.get_cuda_rng_tracker`. DeepSpeed's activation checkpointing does, since it repeats the
    states of its own tracker alone: the masks must then be drawn from that one. So the name is looked up in the package
    at each use.
    """
    return sys.modules["mpu"].get_cuda_rng_tracker()  # type: ignore[no-any-return]


def model_parallel_cuda_manual_seed(seed: int, device: torch.device | str | None = None) -> None:
    """Seed the default generator with `seed`, the tracker of this rank with `seed + 2718 + tensor-parallel rank`.

    The seeds are those of Megatron in 2019: data-parallel ranks that pass the same seed draw the same numbers.
    device: of the model. The tracker keeps the stream of that device's generator. None: of the GPU, where the process
    has used one before, else of the CPU.
    """
    global _device
    _device = None if device is None else torch.device(device).type
    torch.manual_seed(seed)
    tracker = current_rng_tracker()
    tracker.reset()
    tracker.add(MODEL_PARALLEL_RNG, seed + _TRACKER_OFFSET + get_tensor_model_parallel_rank())


def dropout_keys(seed: int, samples: Tensor, num_layers: int) -> Tensor:
    """The keys of a micro-batch, int64 [l, b, 3]: the seed, the sample's number, the layer's.

    samples: int64 [b], the global numbers of the samples, on the device of the model. Tensors, since a compiled layer
    would be compiled anew for every number.
    """
    keys = torch.empty(num_layers, samples.numel(), 3, dtype=torch.int64, device=samples.device)
    keys[..., 0] = seed
    keys[..., 1] = samples
    keys[..., 2] = torch.arange(num_layers, device=samples.device).unsqueeze(1)
    return keys


def hidden_dropout(
    x: Tensor, p: float, sequence_parallel: bool, *, keys: Tensor | None = None, site: int = 0, rank: int = 0
) -> Tensor:
    """Dropout of hidden states [s, b, h], or [s/p, b, h] with sequence_parallel.

    keys: int64 [b, 3], a layer's of `dropout_keys`. Without them it draws from the default generator where the ranks
    hold the same activations and must drop the same elements, and from the tracker under sequence parallelism, where
    each rank holds a part of its own. rank: in the model-parallel group.
    """
    if p == 0:
        return x
    if keys is not None:
        return kernels.keyed_dropout(x, p, keys, site, rank * x.size(0) if sequence_parallel else 0)
    return dropout_of_own_part(x, p) if sequence_parallel else kernels.dropout(x, p)


def dropout_of_own_part(x: Tensor, p: float) -> Tensor:
    """Dropout with a mask of torch's generators that differs from that of the other ranks. Any shape."""
    with current_rng_tracker().fork():
        return kernels.dropout(x, p)


@contextlib.contextmanager
def _tracker_states(states: dict[str, Tensor]) -> Iterator[None]:
    tracker = current_rng_tracker()
    after = tracker.get_states()
    tracker.set_states(states)
    try:
        yield
    finally:
        tracker.set_states(after)


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    distribute_saved_activations: bool = False,
    host_memory: HostMemory | None = None,
    group: ProcessGroup | None = None,
) -> Any:
    """`function(*args)`, which keeps the arguments alone for backward and computes everything else again there.

    torch's non-reentrant checkpoint repeats the default generator. The tracker is repeated here, so that dropout drops
    the same elements both times. The second computation stops at the last tensor that backward needs, so that a closing
    all-reduce is not repeated.

    distribute_saved_activations: each rank of `group` (default: the default model-parallel group) keeps only its part
    of each argument, which must be the same on all of them; backward gathers it, contiguous. host_memory: holds what is
    kept.
    """
    states = current_rng_tracker().get_states()
    split = (group or get_tensor_model_parallel_group()) if distribute_saved_activations else None
    with keeping_arguments(split, host_memory):
        return torch.utils.checkpoint.checkpoint(
            function, *args, use_reentrant=False, context_fn=lambda: (contextlib.nullcontext(), _tracker_states(states))
        )


def checkpoint_without_output(
    function: Callable[[Tensor], Tensor], consumer: Callable[..., Tensor], *xs: Tensor
) -> Tensor:
    """consumer(function(x)), which keeps x for backward in the place of function(x): of a cheap function, GELU or a
    layer norm, that is computed again. x and function(x) have the same shape, for example [s, b, h]. The consumer is
    given the result of each of several xs.

    `function` keeps its input for its own backward in any case, so nothing is added. Its output is contiguous. Under
    torch.compile this is a plain call: a compiler decides by itself what it keeps of functions as cheap as these.

    It saves 19 of the 50 MB that a layer of GPT-2 124M keeps for a micro-batch on a CPU, and costs 1 to 2 % of the time
    (docs/explanation/performance.md). torch.utils.checkpoint would also compute the product again that reads the
    output. Megatron's CheckpointWithoutOutput frees the output and fills it again by a hook. Here autograd is given the
    input instead, at the moment when the next operation saves the output, which is recognised by its address.
    """
    ys = [function(x) for x in xs]
    if torch.compiler.is_compiling():
        return consumer(*ys)
    # By address, not y itself, which would live as long as the hook.
    inputs = {(y.data_ptr(), y.nbytes, y.dtype): x for x, y in zip(xs, ys, strict=True)}

    def pack(saved: Tensor) -> Tensor | tuple[torch.Size, Tensor]:
        x = inputs.get((saved.data_ptr(), saved.nbytes, saved.dtype))
        return saved if x is None or not saved.is_contiguous() else (saved.shape, x)

    def unpack(saved: Tensor | tuple[torch.Size, Tensor]) -> Tensor:
        # A product may save its input [s, b, h] as [s · b, h].
        return saved if isinstance(saved, Tensor) else function(saved[1]).view(saved[0])

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return consumer(*ys)
