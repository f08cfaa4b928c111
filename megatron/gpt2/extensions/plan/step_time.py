"""The modelled time of a training step of other Megatron-style programs, from a description of the program and a
cluster.

It validates the model of machine, network and schedule against published measurements (`benchmarks/step_times.py`).

Legend: b micro-batch, s sequence, h hidden, n heads, l layers, v vocabulary; t, p, d tensor-,
pipeline-, data-parallel size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron.gpt2.extensions.plan.cluster import Cluster

VOCAB_SIZE = 50257
HALF = 2  # bytes of a 16-bit number


@dataclass(frozen=True)
class Software:
    """A Megatron-style program.

    kernels, traffic: constants of a generation of the program: kernels that the host launches in the forward pass of a
        layer, and bytes of element-wise kernels relative to the list in `layer_bytes`.
    recompute: "full", "selective" (attention, or with fused attention GELU and norms) or "none".
    sequence_parallel: norms and dropout are split.
    softmax_heads: the fused softmax runs only if this number divides the samples × heads of a rank; otherwise
        `unfused_kernels` more are launched.
    backward_kernels: number of kernels of the backward pass relative to the forward pass.
    head_kernels: the kernels of embedding, head and loss.
    loss_bytes: bytes that the loss moves per logit.
    odd_vocabulary: time of the products with the vocabulary on one tensor-parallel rank relative to other products.
        Kernels for an odd number of columns (50,257) are slower. It is 1 if the program pads them.
    score_traffic: `traffic` of the attention scores, relative to that of other element-wise kernels.
    product_time: time of matrix products relative to the cluster's. Libraries become faster.
    one_node: time of matrix products on one node relative to several nodes. The rows on one node look like sums of
        layers that were timed one by one, which keeps clocks high.
    gradient_bytes: per parameter and micro-batch, for the sum of gradients.
    split_sends: the ranks of a tensor-parallel group share the transfer between stages.
    fused_attention: attention stores no scores.
    overlap: gradients are summed under the backward pass of the last micro-batch.
    sum_bytes: bytes per parameter of the sum of gradients over data-parallel ranks.
    sharded_optimizer: the ranks of a data-parallel group share the optimizer.
    """

    kernels: float
    traffic: float
    recompute: str = "full"
    sequence_parallel: bool = False
    softmax_heads: int = 4
    unfused_kernels: float = 25.0
    backward_kernels: float = 1.0
    head_kernels: float = 85.0
    loss_bytes: float = 90.0
    odd_vocabulary: float = 1.0
    score_traffic: float = 1.0
    product_time: float = 1.0
    one_node: float = 1.0
    gradient_bytes: float = 8.0
    split_sends: bool = False
    fused_attention: bool = False
    overlap: bool = False
    sum_bytes: float = HALF
    sharded_optimizer: bool = False


@dataclass(frozen=True)
class Layouts:
    """Configurations, as arrays of equal length, one element each. `num_model_chunks` are model chunks per rank."""

    global_batch: Any
    micro_batch: Any
    hidden_size: Any
    attention_heads: Any
    layers: Any
    sequence_length: Any
    tensor_parallel: Any
    data_parallel: Any
    pipeline_parallel: Any
    num_model_chunks: Any = 1


def step_parts(cluster: Cluster, software: Software, x: Layouts) -> dict[str, Any]:
    """Return the parts of the time of a step in seconds, which add up to the step: "layers", "head",
    "tensor_parallel" (collectives inside layers), "bubble", "send" (between stages), "data_parallel" (sum of
    gradients) and "optimizer"."""
    b, s, h, t, p, d = (
        x.micro_batch,
        x.sequence_length,
        x.hidden_size,
        x.tensor_parallel,
        x.pipeline_parallel,
        x.data_parallel,
    )
    tokens, heads = b * s, b * x.attention_heads / t
    multi_node = t * d * p > cluster.gpus_per_node
    product_time = software.product_time * np.where(multi_node, 1.0, software.one_node)

    def matmul(m: Any, n: Any, k: Any, batch: Any = 1) -> Any:
        return product_time * cluster.matmul(m, n, k, batch)

    # These are the costs of one layer: the weights' products, attention's products, and element-wise kernels.
    sizes = ((3 * h / t, h), (h, h / t), (4 * h / t, h), (h, 4 * h / t))  # [out, in] of qkv, projection, MLP
    forward = sum(matmul(tokens, out, inner) for out, inner in sizes)
    backward = sum(matmul(tokens, inner, out) + matmul(out, inner, tokens) for out, inner in sizes)
    head_size = h / x.attention_heads
    score_bytes, row_bytes = 0 if software.fused_attention else heads * s * s * HALF, tokens * h * HALF
    # Sequence parallelism splits norms, dropout and residual sums by this number.
    split = t if software.sequence_parallel else 1
    scores = cluster.move(software.traffic * software.score_traffic * score_bytes)  # the time of one read or write
    # Unfused products are as long as the scores that they write or read.
    attention = np.maximum(
        matmul(s, s, head_size, heads) + matmul(s, head_size, s, heads), cluster.move(2 * score_bytes)
    )
    forward = forward + attention + 6 * scores + cluster.move(software.traffic * row_bytes * (14 / split + 14 / t))
    backward = (
        backward
        + 2 * attention
        + 5 * scores
        + cluster.move(software.traffic * row_bytes * (16 / split + 18 / t))
        + cluster.move(software.gradient_bytes * 12 * h * h / t)
    )
    # Each pass has two all-reduces.
    reduce = 2 * np.where(t > 1, cluster.all_reduce(row_bytes, t, link=cluster.link), 0.0)
    kernels = software.kernels + np.where(heads % software.softmax_heads, software.unfused_kernels, 0.0)
    host = cluster.host(kernels, t)
    starts = kernels * cluster.kernel  # on the GPU
    full = np.maximum(forward + starts + reduce, host)
    back = np.maximum(backward + reduce + software.backward_kernels * starts, software.backward_kernels * host)
    elementwise = cluster.move(software.traffic * row_bytes * (4 / split + 8 / t))
    again = {
        "full": full,
        "selective": elementwise if software.fused_attention else attention + 6 * scores,
        "none": 0.0,
    }[software.recompute]
    layers_of_stage = x.layers / p
    stage = layers_of_stage * (full + back + again)
    passes = 3 if software.recompute == "full" else 2

    # These are the costs of the embedding, the head and the loss.
    vocab = np.ceil(VOCAB_SIZE / (128 * t)) * 128 * t
    table_gradient = cluster.move(software.gradient_bytes * vocab * h / t)
    head_products = matmul(tokens, vocab / t, h) + matmul(tokens, h, vocab / t) + matmul(vocab / t, h, tokens)
    head_gpu = (
        head_products * np.where(t > 1, 1, software.odd_vocabulary)
        + cluster.move(software.loss_bytes * tokens * vocab / t)
        + software.head_kernels * cluster.kernel
        + reduce / 2
    )
    head = np.maximum(head_gpu, cluster.host(software.head_kernels, t)) + table_gradient
    embedding = cluster.move(30 * row_bytes) + reduce / 2 + table_gradient

    # 1F1B: a step takes as long as the slowest stage needs for all micro-batches, plus the time until the pipeline is
    # full.
    micro_batches = x.global_batch / d / b
    crosses_nodes = multi_node & (t * d >= cluster.gpus_per_node)
    message = row_bytes / (t if software.split_sends else 1)
    send = np.where(p > 1, 2 * cluster.point_to_point(message, crosses_nodes), 0.0)
    ends = np.where(p > 1, np.maximum(head, embedding), head + embedding)
    parameters = layers_of_stage * 12 * h * h / t + vocab * h / t
    gradients = software.sum_bytes * parameters
    data_parallel = np.where(d > 1, cluster.all_reduce(gradients, d, t, link=cluster.data_link), 0.0)
    if software.overlap:
        data_parallel = np.maximum(data_parallel - layers_of_stage * back, data_parallel / micro_batches / 10)
    owned = parameters / (d if software.sharded_optimizer else 1)
    tied = HALF * vocab * h / t / np.where(multi_node, cluster.network, cluster.data_link)
    return {
        "layers": micro_batches * layers_of_stage * (full + back + again - passes * reduce),
        "tensor_parallel": micro_batches * layers_of_stage * passes * reduce,
        "head": micro_batches * ends,
        "bubble": (p - 1) * (stage / x.num_model_chunks),
        "send": send * (micro_batches * x.num_model_chunks + p - 1),
        "data_parallel": data_parallel + np.where(p > 1, tied, 0.0),
        "optimizer": cluster.step + cluster.adam * owned,
    }


def step_seconds(cluster: Cluster, software: Software, x: Layouts) -> Any:
    """Return the time of a step in seconds."""
    return sum(step_parts(cluster, software, x).values())
