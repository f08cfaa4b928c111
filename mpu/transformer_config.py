"""What a transformer layer is: its shape, and how it is parallel and recomputed. The names are megatron.core's."""

from dataclasses import dataclass

import torch
from torch.distributed import ProcessGroup

from mpu.partition import divide

GELU = ("tanh", "erf")
RECOMPUTE_GRANULARITY = ("none", "selective", "full")


@dataclass(frozen=True)
class TransformerConfig:
    """One description for a layer and its parts. Raises ValueError where the numbers do not fit each other.

    hidden_size: h. num_attention_heads: n, which divides h. ffn_hidden_size: f, the width inside the MLP.
    attention_dropout: of the attention probabilities. hidden_dropout: of the outputs of attention and MLP.
    layernorm_epsilon: is added to the variance. gelu: "tanh", GPT-2's form, or "erf".
    recompute_granularity: what is computed again in backward instead of being kept. "selective": the outputs of GELU
    and of the layer norms. "full": all but the input of every `recompute_num_layers` layers; the stack of layers does
    this.
    distribute_saved_activations: with "full", every rank of the group keeps its part alone of each of these inputs;
    with sequence_parallel it has no more. checkpoint_in_cpu: with "full", they are kept in the host's memory.
    cpu_offloading_num_layers: with "none", what the first so many layers keep is there. On a CPU, whose memory is the
    host's, the two change nothing. The stack of layers does all three.
    sequence_parallel: between the split layers the sequence is split over the group, which must divide it.
    group: over which the layer is split (default: the default model-parallel group). device: of the parameters.
    """

    hidden_size: int
    num_attention_heads: int
    ffn_hidden_size: int
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    layernorm_epsilon: float = 1e-5
    gelu: str = "tanh"
    recompute_granularity: str = "none"
    recompute_num_layers: int = 1
    distribute_saved_activations: bool = False
    checkpoint_in_cpu: bool = False
    cpu_offloading_num_layers: int = 0
    sequence_parallel: bool = False
    group: ProcessGroup | None = None
    device: torch.device | str | None = None

    def __post_init__(self) -> None:
        divide(self.hidden_size, self.num_attention_heads)
        for value, choices in ((self.gelu, GELU), (self.recompute_granularity, RECOMPUTE_GRANULARITY)):
            if value not in choices:
                raise ValueError(f"{value!r} is none of {', '.join(choices)}")

    @property
    def head_size(self) -> int:
        """d = h / n."""
        return self.hidden_size // self.num_attention_heads
