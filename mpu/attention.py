"""Causal self-attention, its heads split over a model-parallel group, and attention within documents.

    Attention(Q, K, V) = softmax(QKᵀ/√d + M) V        M: 0 up to the query's own position, -inf after it

Legend: b batch, s sequence, h hidden, n heads, d head size, p model-parallel size, t = b · s tokens, a sample after the
other.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpu import kernels
from mpu.dropout import OF_PROBABILITIES
from mpu.layers import ColumnParallelLinear, InitMethod, RowParallelLinear
from mpu.partition import divide
from mpu.random import current_rng_tracker
from mpu.transformer_config import TransformerConfig

Attend = Callable[[Tensor], Tensor]


class Documents:
    """The documents of a micro-batch: what attention needs so that no token sees another document.

    lengths: of each document, or of its part in a sample, one after the other; t in all. cu_seqlens: int32
    [len(lengths) + 1], 0 and the sums of the lengths, on the device of the model.
    """

    def __init__(self, tokens: Tensor, eod: int, device: torch.device | str) -> None:
        """tokens: int64 [b, s] on the host. A document ends with the token `eod`, and at the end of a sample."""
        last = tokens == eod
        last[:, -1] = True
        ends = F.pad(last.flatten().nonzero().flatten() + 1, (1, 0))  # [b, s] -> [t] -> [len(lengths) + 1]
        self.lengths: list[int] = ends.diff().tolist()
        ends = ends.int()
        on_gpu = torch.device(device).type == "cuda"
        self.cu_seqlens = ends.pin_memory().to(device, non_blocking=True) if on_gpu else ends


def document_attention(qkv: Tensor, dropout_p: float, documents: Documents | None) -> Tensor:
    """Causal attention within each document: [s, b, n, 3, d] -> [s, b, n·d]. It takes less work than without documents,
    and never more memory. None: each sample is one document."""
    s, b, n, _, d = qkv.shape
    if documents is None or len(documents.lengths) == b:
        return kernels.causal_attention(qkv, dropout_p)
    tokens = qkv.transpose(0, 1).reshape(b * s, 1, n, 3, d)  # [s, b, n, 3, d] -> [b, s, n, 3, d] -> [t, 1, n, 3, d]
    y = kernels.document_attention(tokens, dropout_p, documents.lengths, documents.cu_seqlens)
    return y.reshape(b, s, n * d).transpose(0, 1)  # [t, 1, n·d] -> [b, s, n·d] -> [s, b, n·d]


def keyed_attention(
    qkv: Tensor, dropout_p: float, documents: Documents | None, keys: Tensor, first_head: int
) -> Tensor:
    """`document_attention` with masks that follow from `keys`, int64 [b, 3]. first_head: of this rank."""
    s, b, n, _, d = qkv.shape
    if documents is None:
        return kernels.keyed_attention(qkv, dropout_p, keys, OF_PROBABILITIES, first_head)
    parts, start = [], 0
    tokens = qkv.transpose(0, 1).reshape(b * s, 1, n, 3, d)  # [s, b, n, 3, d] -> [b, s, n, 3, d] -> [t, 1, n, 3, d]
    for part in tokens.split(documents.lengths):
        sample, first = divmod(start, s)
        parts.append(
            kernels.keyed_attention(part, dropout_p, keys[sample : sample + 1], OF_PROBABILITIES, first_head, first)
        )
        start += part.size(0)
    return torch.cat(parts).view(b, s, n * d).transpose(0, 1)  # [t, 1, n·d] -> [b, s, n·d] -> [s, b, n·d]


def core_attention(
    qkv: Tensor, dropout_p: float, documents: Documents | None = None, keys: Tensor | None = None, first_head: int = 0
) -> Tensor:
    """[s, b, n, 3, d] -> [s, b, n·d]. keys, first_head: see `keyed_attention`.

    Without keys, and on a GPU, whose kernels draw for themselves, dropout draws from the tracker: each rank has other
    heads, and other masks.
    """
    if dropout_p == 0:
        return document_attention(qkv, 0.0, documents)
    if keys is not None and kernels.attention_takes_keys(qkv.device.type):
        return keyed_attention(qkv, dropout_p, documents, keys, first_head)
    with current_rng_tracker().fork():
        return document_attention(qkv, dropout_p, documents)


class ParallelSelfAttention(nn.Module):
    """Causal self-attention, heads split over the ranks. [s, b, h] -> [s, b, h], or [s/p, b, h] -> [s/p, b, h] with
    sequence_parallel. Forward: one all-reduce; backward: one. Under sequence parallelism each becomes two halves.

    The fused query-key-value weight is head-major, its rows ordered as [n, 3, d], so that every rank's shard is
    contiguous. column, row: make the linear layers. Raises ValueError where p does not divide n.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        init_method: InitMethod,
        output_init_method: InitMethod,
        column: Callable[..., ColumnParallelLinear] = ColumnParallelLinear,
        row: Callable[..., RowParallelLinear] = RowParallelLinear,
    ) -> None:
        super().__init__()
        h = config.hidden_size
        self.head_size, self.attention_dropout = config.head_size, config.attention_dropout
        self.query_key_value = column(
            h,
            3 * h,
            gather_output=False,
            sequence_parallel=config.sequence_parallel,
            init_method=init_method,
            group=config.group,
            device=config.device,
        )
        self.dense = row(
            h,
            h,
            input_is_parallel=True,
            sequence_parallel=config.sequence_parallel,
            init_method=output_init_method,
            group=config.group,
            device=config.device,
        )
        divide(config.num_attention_heads, self.dense.world_size)
        # An attribute, which the layer's `compile` replaces by a function that is left out of compiled graphs.
        self.core_attention = core_attention

    def forward(
        self, x: Tensor, documents: Documents | None = None, attend: Attend | None = None, keys: Tensor | None = None
    ) -> Tensor:
        """[s, b, h] -> [s, b, h].

        documents: of the whole sequence; None lets every token see all before it. attend: replaces causal attention,
        [s, b, n/p, 3, d] -> [s, b, h/p]; a `KeyValueCache` has one. keys: this layer's of `mpu.dropout_keys`; None
        lets dropout draw from torch's generators.
        """
        qkv = self.split_heads(self.query_key_value(x))
        out: Tensor = self.dense(self.of_heads(qkv, documents, attend, keys, self.dense.rank * qkv.size(2)))
        return out

    def split_heads(self, qkv: Tensor) -> Tensor:
        """[s, b, 3h/p] -> [s, b, n/p, 3, d]."""
        return qkv.view(*qkv.shape[:2], -1, 3, self.head_size)

    def of_heads(
        self, qkv: Tensor, documents: Documents | None, attend: Attend | None, keys: Tensor | None, first_head: int
    ) -> Tensor:
        """Attention of some heads, of which first_head is the first: [s, b, n/p, 3, d] -> [s, b, h/p]."""
        dropout_p = self.attention_dropout if self.training else 0.0
        if attend is not None:
            return attend(qkv)
        if dropout_p == 0 and documents is None:
            return kernels.causal_attention(qkv, 0.0)
        return self.core_attention(qkv, dropout_p, documents, keys, first_head)
