"""Causal self-attention of some heads, and attention within documents.

    Attention(Q, K, V) = softmax(QKᵀ/√d + M) V        M: 0 up to the query's own position, -inf after it

Legend: b batch, s sequence, n heads, d head size, t = b · s tokens, a sample after the other.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from mpu import kernels
from mpu.random import OF_PROBABILITIES, current_rng_tracker


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


def document_attention(
    qkv: Tensor, dropout_p: float, documents: Documents | None, keys: Tensor | None = None, first_head: int = 0
) -> Tensor:
    """Causal attention within each document: [s, b, n, 3, d] -> [s, b, n·d]. It takes less work than without documents,
    and never more memory. documents: None if each sample is one. keys: int64 [b, 3], which the masks of dropout follow
    from; without them it draws from torch's generator. first_head: of this rank."""
    s, b, n, _, d = qkv.shape
    if documents is None and keys is not None:
        return kernels.keyed_attention(qkv, dropout_p, keys, OF_PROBABILITIES, first_head)
    if documents is None or (keys is None and len(documents.lengths) == b):
        return kernels.causal_attention(qkv, dropout_p)
    tokens = qkv.transpose(0, 1).reshape(b * s, 1, n, 3, d)  # [s, b, n, 3, d] -> [b, s, n, 3, d] -> [t, 1, n, 3, d]
    if keys is None:
        y = kernels.document_attention(tokens, dropout_p, documents.lengths, documents.cu_seqlens)
    else:
        parts, start = [], 0
        for part in tokens.split(documents.lengths):
            sample, first = divmod(start, s)
            key = keys[sample : sample + 1]
            parts.append(kernels.keyed_attention(part, dropout_p, key, OF_PROBABILITIES, first_head, first))
            start += part.size(0)
        y = torch.cat(parts)
    return y.view(b, s, n * d).transpose(0, 1)  # [t, 1, n·d] -> [b, s, n·d] -> [s, b, n·d]


def core_attention(
    qkv: Tensor, dropout_p: float, documents: Documents | None = None, keys: Tensor | None = None, first_head: int = 0
) -> Tensor:
    """[s, b, n, 3, d] -> [s, b, n·d]. The arguments are those of `document_attention`.

    Without keys, and on a GPU, whose kernels draw for themselves, dropout draws from the tracker: each rank has other
    heads, and other masks.
    """
    if dropout_p == 0:
        return document_attention(qkv, 0.0, documents)
    if keys is not None and kernels.attention_takes_keys(qkv.device.type):
        return document_attention(qkv, dropout_p, documents, keys, first_head)
    with current_rng_tracker().fork():
        return document_attention(qkv, dropout_p, documents)
