"""The model-parallel unit: tensor parallelism in the Megatron style, with only torch (and numpy's generator for
dropout that is given keys).

The files in the order in which to read them:

    partition     which part of a parameter each rank owns
    initialize    the groups of ranks
    mappings      the four communication operations with their gradients, and the pair of sequence parallelism
    pipeline      what the stages of a pipeline send each other
    random        random streams, dropout, and activation checkpointing that repeats them
    grads         partial gradients that are completed, the global norm, clipping
    layers        column- and row-parallel linear layers, embeddings
    attention     causal self-attention of some heads, and attention within documents
    cross_entropy the loss over a split vocabulary
    transformer   what a layer is; attention, MLP and layer

`kv_cache` serves generation, `host_memory` holds what backward needs on the host, and `megatron_2019` has names of 2019
that nothing here uses.
`kernels` chooses for a device, dtype and case how an operation is computed; it knows nothing of ranks.

The names below that Megatron's `mpu` had in 2019 keep their meaning and the order of their arguments. Arguments that
came later are given by keyword.
"""

from mpu.attention import Documents
from mpu.cross_entropy import vocab_parallel_cross_entropy, vocab_parallel_linear_cross_entropy
from mpu.grads import clip_grad_norm, mark_sequence_parallel, squared_norm, sum_sequence_parallel_grads
from mpu.host_memory import HostMemory
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
from mpu.kernels import dropout, linear_without_gradient
from mpu.kv_cache import KeyValueCache
from mpu.layers import (
    ColumnParallelLinear,
    PositionEmbedding,
    RowParallelLinear,
    VocabParallelEmbedding,
)
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
from mpu.partition import Box, PartitionSpec, divide, padded_vocab_size, partition_specs
from mpu.pipeline import (
    Transfer,
    broadcast_from_last_stage,
    exchange,
    receive_from_previous_stage,
    send_to_next_stage,
)
from mpu.random import dropout_keys, get_cuda_rng_tracker, hidden_dropout, model_parallel_cuda_manual_seed
from mpu.transformer import (
    PLAIN_MODULES,
    LayerNorm,
    Modules,
    ParallelMLP,
    ParallelSelfAttention,
    ParallelTransformerLayer,
    TransformerConfig,
)

__all__ = [
    "Box",
    "ColumnParallelLinear",
    "Documents",
    "HostMemory",
    "KeyValueCache",
    "LayerNorm",
    "Modules",
    "PLAIN_MODULES",
    "ParallelEmbedding",
    "ParallelMLP",
    "ParallelSelfAttention",
    "ParallelState",
    "ParallelTransformerLayer",
    "PartitionSpec",
    "PositionEmbedding",
    "RowParallelLinear",
    "Transfer",
    "TransformerConfig",
    "VocabParallelEmbedding",
    "broadcast_data",
    "broadcast_from_last_stage",
    "checkpoint",
    "clip_grad_norm",
    "copy_to_model_parallel_region",
    "destroy_model_parallel",
    "divide",
    "dropout",
    "dropout_keys",
    "exchange",
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
    "hidden_dropout",
    "initialize_model_parallel",
    "is_pipeline_first_stage",
    "is_pipeline_last_stage",
    "linear_without_gradient",
    "mark_sequence_parallel",
    "model_parallel_cuda_manual_seed",
    "model_parallel_is_initialized",
    "padded_vocab_size",
    "partition_activations_in_checkpoint",
    "partition_specs",
    "receive_from_previous_stage",
    "reduce_from_model_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "scatter_to_model_parallel_region",
    "send_to_next_stage",
    "squared_norm",
    "sum_sequence_parallel_grads",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_linear_cross_entropy",
]
