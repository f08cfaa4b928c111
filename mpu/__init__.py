"""The model-parallel unit: tensor parallelism in the Megatron style, with torch alone.

The names below that Megatron's `mpu` had in 2019 keep their meaning and the order of their arguments; arguments that
came later are by keyword.
"""

from mpu.attention import Documents
from mpu.cross_entropy import vocab_parallel_cross_entropy, vocab_parallel_linear_cross_entropy
from mpu.data import broadcast_data
from mpu.grads import clip_grad_norm, mark_sequence_parallel, squared_norm, sum_sequence_parallel_grads
from mpu.initialize import (
    ParallelState,
    destroy_model_parallel,
    get_data_parallel_group,
    get_data_parallel_rank,
    get_data_parallel_world_size,
    get_model_parallel_group,
    get_model_parallel_rank,
    get_model_parallel_src_rank,
    get_model_parallel_world_size,
    get_parallel_state,
    initialize_model_parallel,
    model_parallel_is_initialized,
)
from mpu.kv_cache import KeyValueCache
from mpu.layers import (
    ColumnParallelLinear,
    ParallelEmbedding,
    RowParallelLinear,
    VocabParallelEmbedding,
    linear_without_gradient,
)
from mpu.mappings import (
    copy_to_model_parallel_region,
    gather_from_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_model_parallel_region,
)
from mpu.partition import Box, PartitionSpec, divide, padded_vocab_size, partition_specs
from mpu.random import checkpoint, dropout, get_cuda_rng_tracker, model_parallel_cuda_manual_seed
from mpu.transformer import LayerNorm, ParallelMLP, ParallelSelfAttention, ParallelTransformerLayer, hidden_dropout

__all__ = [
    "Box",
    "ColumnParallelLinear",
    "Documents",
    "KeyValueCache",
    "LayerNorm",
    "ParallelEmbedding",
    "ParallelMLP",
    "ParallelSelfAttention",
    "ParallelState",
    "ParallelTransformerLayer",
    "PartitionSpec",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "broadcast_data",
    "checkpoint",
    "clip_grad_norm",
    "copy_to_model_parallel_region",
    "destroy_model_parallel",
    "divide",
    "dropout",
    "gather_from_model_parallel_region",
    "gather_from_sequence_parallel_region",
    "get_cuda_rng_tracker",
    "get_data_parallel_group",
    "get_data_parallel_rank",
    "get_data_parallel_world_size",
    "get_model_parallel_group",
    "get_model_parallel_rank",
    "get_model_parallel_src_rank",
    "get_model_parallel_world_size",
    "get_parallel_state",
    "hidden_dropout",
    "initialize_model_parallel",
    "linear_without_gradient",
    "mark_sequence_parallel",
    "model_parallel_cuda_manual_seed",
    "model_parallel_is_initialized",
    "padded_vocab_size",
    "partition_specs",
    "reduce_from_model_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "scatter_to_model_parallel_region",
    "squared_norm",
    "sum_sequence_parallel_grads",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_linear_cross_entropy",
]
