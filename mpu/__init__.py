"""Model parallelism in the Megatron style: process groups, split layers and their collectives. The package needs only
torch; dropout with given seeds also needs numpy. On a GPU, Triton (a part of torch's builds for GPUs) computes norms,
GELU, the loss, AdamW and dropout with given seeds. If a Triton kernel fails, `TritonKernel` warns and uses PyTorch's
operators.

The modules, from the lowest to the highest:

    partition:         which slice of a parameter each rank holds
    initialize:        process groups, and `ParallelState`
    mappings:          the collectives of tensor and sequence parallelism, with their gradients
    p2p_communication: sends and receives between pipeline stages
    grads:             sums of partial gradients, the global norm, clipping
    random:            random number streams, dropout, activation checkpointing
    layers:            column-parallel and row-parallel linear layers, embeddings
    cross_entropy:     the loss when the vocabulary is split over ranks
    attention:         causal self-attention, over samples or within documents
    transformer:       attention, MLP and transformer layer

`kv_cache` is for generation. `activation_offload` copies activations to host memory. `megatron_2019` has functions
of Megatron's first release. `kernels` computes single operations; the device, dtype and shape decide which kernel runs.
The modules in `kernels` use no process groups.

Functions and classes of the `mpu` of Megatron's first release (2019) keep their meaning and the order of their
arguments. Arguments that were added later are keyword-only.
"""

from torch.nn.functional import dropout as dropout  # `mpu.dropout` was public until version 0.3.

from mpu.activation_offload import ActivationOffload
from mpu.attention import PackedSeqParams
from mpu.cross_entropy import vocab_parallel_cross_entropy, vocab_parallel_linear_cross_entropy
from mpu.grads import (
    all_reduce_sequence_parallel_grads,
    all_reduced_squared_norm,
    clip_grad_norm,
    mark_sequence_parallel,
)
from mpu.initialize import (
    ParallelState,
    destroy_model_parallel,
    get_data_parallel_group,
    get_data_parallel_rank,
    get_data_parallel_world_size,
    get_embedding_group,
    get_model_parallel_group,
    get_model_parallel_rank,
    get_model_parallel_src_rank,
    get_model_parallel_world_size,
    get_parallel_state,
    get_pipeline_model_parallel_group,
    get_pipeline_model_parallel_rank,
    get_pipeline_model_parallel_world_size,
    get_tensor_model_parallel_group,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_src_rank,
    get_tensor_model_parallel_world_size,
    initialize_model_parallel,
    is_pipeline_first_stage,
    is_pipeline_last_stage,
    model_parallel_is_initialized,
)
from mpu.kernels import linear_without_gradient, weight_for_inference
from mpu.kv_cache import KeyValueCache
from mpu.layers import ColumnParallelLinear, PositionEmbedding, RowParallelLinear, VocabParallelEmbedding
from mpu.mappings import (
    copy_to_model_parallel_region,
    gather_from_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_model_parallel_region,
)
from mpu.megatron_2019 import (
    ParallelEmbedding,
    broadcast_data,
    checkpoint,
    partition_activations_in_checkpoint,
)
from mpu.p2p_communication import (
    Transfer,
    batched_p2p_ops,
    broadcast_from_last_stage,
    recv_forward,
    send_forward,
)
from mpu.partition import PartitionSpec, TensorSlice, divide, padded_vocab_size, partition_specs
from mpu.random import (
    apply_hidden_dropout,
    get_cuda_rng_tracker,
    make_dropout_seeds,
    model_parallel_cuda_manual_seed,
)
from mpu.transformer import (
    DEFAULT_SUBMODULES,
    LayerNorm,
    ModelSubmodules,
    ParallelMLP,
    ParallelSelfAttention,
    ParallelTransformerLayer,
    TransformerConfig,
)

# The following names were public until version 0.3.
squared_norm, hidden_dropout = all_reduced_squared_norm, apply_hidden_dropout
exchange, send_to_next_stage, receive_from_previous_stage = batched_p2p_ops, send_forward, recv_forward

__all__ = [
    "ActivationOffload",
    "ColumnParallelLinear",
    "DEFAULT_SUBMODULES",
    "KeyValueCache",
    "LayerNorm",
    "ModelSubmodules",
    "PackedSeqParams",
    "ParallelEmbedding",
    "ParallelMLP",
    "ParallelSelfAttention",
    "ParallelState",
    "ParallelTransformerLayer",
    "PartitionSpec",
    "PositionEmbedding",
    "RowParallelLinear",
    "TensorSlice",
    "Transfer",
    "TransformerConfig",
    "VocabParallelEmbedding",
    "all_reduce_sequence_parallel_grads",
    "all_reduced_squared_norm",
    "apply_hidden_dropout",
    "batched_p2p_ops",
    "broadcast_data",
    "broadcast_from_last_stage",
    "checkpoint",
    "clip_grad_norm",
    "copy_to_model_parallel_region",
    "destroy_model_parallel",
    "divide",
    "gather_from_model_parallel_region",
    "gather_from_sequence_parallel_region",
    "get_cuda_rng_tracker",
    "get_data_parallel_group",
    "get_data_parallel_rank",
    "get_data_parallel_world_size",
    "get_embedding_group",
    "get_model_parallel_group",
    "get_model_parallel_rank",
    "get_model_parallel_src_rank",
    "get_model_parallel_world_size",
    "get_parallel_state",
    "get_pipeline_model_parallel_group",
    "get_pipeline_model_parallel_rank",
    "get_pipeline_model_parallel_world_size",
    "get_tensor_model_parallel_group",
    "get_tensor_model_parallel_rank",
    "get_tensor_model_parallel_src_rank",
    "get_tensor_model_parallel_world_size",
    "initialize_model_parallel",
    "is_pipeline_first_stage",
    "is_pipeline_last_stage",
    "linear_without_gradient",
    "make_dropout_seeds",
    "mark_sequence_parallel",
    "model_parallel_cuda_manual_seed",
    "model_parallel_is_initialized",
    "padded_vocab_size",
    "partition_activations_in_checkpoint",
    "partition_specs",
    "recv_forward",
    "reduce_from_model_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "scatter_to_model_parallel_region",
    "send_forward",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_linear_cross_entropy",
    "weight_for_inference",
]
