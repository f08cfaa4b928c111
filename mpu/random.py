"""Random number streams, dropout, and activation checkpointing that repeats the same random numbers.

GPT-2's dropout uses `make_dropout_seeds` by default (`--dropout-rng counter`, described below). With `--dropout-rng
torch`, and in attention on a GPU, dropout draws from two streams:

    default generator:  draws the same masks of embeddings and hidden states on all ranks of a tensor-parallel group,
                        because these tensors are replicated
    tracker:            draws the masks of attention, whose heads are split, and with sequence parallelism those of
                        hidden states; its seed is seed + 2718 + tensor-parallel rank

A program that needs different numbers on each data-parallel rank or pipeline stage must pass different seeds. All
functions work on CPU and GPU. Some names contain "cuda" because Megatron's names do.

Dropout with `make_dropout_seeds` does not use these streams. A mask is a function of the seed, the sample id, the
layer, the location in the layer, and the position and channel (in attention: head, query and key). A mask is therefore
equal in every layout and micro-batch, and when a layer is recomputed. No mask is saved.
`kernels/dropout.py` has the function.

Legend: b batch, s sequence, h hidden, tp tensor-parallel size, l layers.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor
from torch.distributed import ProcessGroup

from mpu import kernels
from mpu.activation_offload import ActivationOffload, shard_and_offload_saved_tensors
from mpu.initialize import get_tensor_model_parallel_group, get_tensor_model_parallel_rank

MODEL_PARALLEL_RNG = "model-parallel-rng"
_TRACKER_OFFSET = 2718
# the locations of dropout in a layer; the dropout of the embeddings belongs to the first layer
EMBEDDING_DROPOUT, ATTENTION_DROPOUT, POST_ATTENTION_DROPOUT, POST_MLP_DROPOUT = range(4)

_device: str | None = None  # the device of dropout's generator, "cpu" or "cuda"; None before it is set


def _on_gpu() -> bool:
    if _device is not None:
        return _device == "cuda"
    # A process that has not used its GPU draws on the CPU. Reading the state must not initialise CUDA.
    return torch.cuda.is_available() and torch.cuda.is_initialized()


def _get_state() -> Tensor:
    return torch.cuda.get_rng_state() if _on_gpu() else torch.get_rng_state()


def _set_state(state: Tensor) -> None:
    (torch.cuda if _on_gpu() else torch).set_rng_state(state)


class RNGStatesTracker:
    """Named random number streams. Inside `fork(name)` torch's default generator draws from the stream `name`.

    A stream is saved as a generator state of torch, uint8: of the GPU's generator if the process uses a GPU, else of
    the CPU's.
    """

    def __init__(self) -> None:
        self._states: dict[str, Tensor] = {}

    def reset(self) -> None:
        """Remove all streams."""
        self._states.clear()

    def get_states(self) -> dict[str, Tensor]:
        """Return a copy of each stream's state, by name."""
        return {name: state.clone() for name, state in self._states.items()}

    def set_states(self, states: dict[str, Tensor]) -> None:
        """Replace all streams by copies of `states`."""
        self._states = {name: state.clone() for name, state in states.items()}

    def add(self, name: str, seed: int) -> None:
        """Create the stream `name` with `seed`. Raises ValueError if the stream exists."""
        if name in self._states:
            raise ValueError(f"the random stream {name!r} exists already")
        before = _get_state()
        (torch.cuda if _on_gpu() else torch.default_generator).manual_seed(seed)
        self._states[name] = _get_state()
        _set_state(before)

    @contextlib.contextmanager
    def fork(self, name: str = MODEL_PARALLEL_RNG) -> Iterator[None]:
        """Return a context in which the default generator is the stream `name`. After the context, the default
        generator continues its former stream. Raises KeyError if the stream does not exist."""
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
    """Return the tracker of this process."""
    return _tracker


def current_rng_tracker() -> RNGStatesTracker:
    """Return `mpu.get_cuda_rng_tracker()`. The layers and `checkpoint` use this function.

    A program may replace `mpu.get_cuda_rng_tracker`, so this function looks the name up in the package at each call.
    DeepSpeed's activation checkpointing repeats only masks that are drawn from DeepSpeed's tracker.
    """
    return sys.modules["mpu"].get_cuda_rng_tracker()  # type: ignore[no-any-return]


def model_parallel_cuda_manual_seed(seed: int, device: torch.device | str | None = None) -> None:
    """Seed the default generator with `seed`, and this rank's tracker with `seed + 2718 + tensor-parallel rank`.

    The seeds are those of Megatron's first release: data-parallel ranks that pass the same seed draw the same numbers.

    device: the model's device, whose generator the tracker uses (default: the GPU if the process has used one, else the
        CPU).
    """
    global _device
    _device = None if device is None else torch.device(device).type
    torch.manual_seed(seed)
    tracker = current_rng_tracker()
    tracker.reset()
    tracker.add(MODEL_PARALLEL_RNG, seed + _TRACKER_OFFSET + get_tensor_model_parallel_rank())


def make_dropout_seeds(seed: int, sample_ids: Tensor, num_layers: int) -> Tensor:
    """Return the numbers that determine the dropout masks of a micro-batch, int64 [l, b, 3]: the seed, the sample
    id and the number of the layer. Integers instead of a tensor would make torch.compile compile a layer again for each
    new number.

    sample_ids: int64 [b], the number of each sample in the run, on the model's device.
    """
    seeds = torch.empty(num_layers, sample_ids.numel(), 3, dtype=torch.int64, device=sample_ids.device)
    seeds[..., 0] = seed
    seeds[..., 1] = sample_ids
    seeds[..., 2] = torch.arange(num_layers, device=sample_ids.device).unsqueeze(1)
    return seeds


def apply_hidden_dropout(
    x: Tensor,
    p: float,
    sequence_parallel: bool,
    *,
    dropout_seeds: Tensor | None = None,
    location: int = EMBEDDING_DROPOUT,
    first_position: int = 0,
) -> Tensor:
    """Dropout of hidden states [s, b, h], or [s/tp, b, h] with sequence_parallel.

    dropout_seeds: int64 [b, 3], one layer of `make_dropout_seeds`. Without seeds the mask is drawn from the default
        generator, because all ranks hold the same activations and must drop the same elements. With sequence_parallel,
        each rank holds a different part, and the mask is drawn from the tracker.
    first_position: the position of x[0] in the samples.
    """
    if p == 0:
        return x
    if dropout_seeds is not None:
        return kernels.seeded_dropout(x, p, dropout_seeds, location, first_position)
    with current_rng_tracker().fork() if sequence_parallel else contextlib.nullcontext():
        return F.dropout(x, p)


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
    activation_offload: ActivationOffload | None = None,
    group: ProcessGroup | None = None,
) -> Any:
    """Call `function(*args)`. Autograd saves only the arguments, and backward computes everything else again.

    torch's non-reentrant checkpoint restores the default generator. This function also restores the tracker, so that
    dropout drops the same elements both times. The recomputation stops at the last tensor that backward needs: an
    all-reduce at the end of `function` is repeated only if dropout follows it.

    distribute_saved_activations: each rank of `group` (default: the default tensor-parallel group) saves only its shard
        of each argument, which must be equal on all ranks of the group. Backward gathers the shards.
    activation_offload: saves the arguments in host memory.
    """
    states = current_rng_tracker().get_states()
    split = (group or get_tensor_model_parallel_group()) if distribute_saved_activations else None
    with shard_and_offload_saved_tensors(split, activation_offload):
        return torch.utils.checkpoint.checkpoint(
            function, *args, use_reentrant=False, context_fn=lambda: (contextlib.nullcontext(), _tracker_states(states))
        )


def checkpoint_without_output(
    function: Callable[[Tensor], Tensor], consumer: Callable[..., Tensor], *xs: Tensor
) -> Tensor:
    """Return consumer(function(x)), but save x for backward instead of function(x). Backward computes `function` again,
    so `function` should be cheap, such as GELU or layer norm. x and function(x) have the same shape, for example
    [s, b, h]. With several xs, the arguments of the consumer are function(x) of each x.

    `function` saves x for its own backward anyway, so saving x needs no more memory. The output of `function` must be
    contiguous. Under torch.compile the function makes a plain call, because the compiler decides what to save or
    recompute.

    In a layer of GPT-2 124M on a CPU, the function frees 19 of the 50 MB of a micro-batch and costs up to 6 % of the
    time (docs/explanation/performance.md). torch.utils.checkpoint would also recompute the consumer's matrix product.
    Megatron's CheckpointWithoutOutput frees the output and restores it in a hook. This function uses a saved-tensor
    hook: when the consumer saves the output, the hook recognises its address and saves the input instead.
    """
    ys = [function(x) for x in xs]
    if torch.compiler.is_compiling():
        return consumer(*ys)
    # Compare addresses, because a reference to y would keep y in memory as long as the hook exists.
    inputs = {(y.data_ptr(), y.nbytes, y.dtype): x for x, y in zip(xs, ys, strict=True)}

    def pack(saved: Tensor) -> Tensor | tuple[torch.Size, Tensor]:
        x = inputs.get((saved.data_ptr(), saved.nbytes, saved.dtype))
        return saved if x is None or not saved.is_contiguous() else (saved.shape, x)

    def unpack(saved: Tensor | tuple[torch.Size, Tensor]) -> Tensor:
        # A matrix product may save its input [s, b, h] as [s · b, h].
        return saved if isinstance(saved, Tensor) else function(saved[1]).view(saved[0])

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return consumer(*ys)
