"""Causal self-attention, over whole samples or within documents.

    Attention(Q, K, V) = softmax(QKᵀ/√d + M) V        M: 0 for keys up to the query's position, -inf after it

Legend: b batch, s sequence, n heads, d head size, t = b · s tokens, sample after sample.
"""

import contextlib
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mpu import kernels
from mpu.random import ATTENTION_DROPOUT, current_rng_tracker


@dataclass(frozen=True)
class PackedSeqParams:
    """The lengths of the documents in a micro-batch, so that no token attends to a token of a different document.
    megatron.core's class of this name changes the shape of the tensors to [t, n, d]; here the shape stays [s, b, n, d].

    lengths: the number of tokens of each document. The sum is t. A document that continues in the next sample counts as
        two documents.
    cu_seqlens_q: int32 [len(lengths) + 1], 0 and the cumulative lengths, on the model's device.
    """

    lengths: list[int]
    cu_seqlens_q: Tensor

    @classmethod
    def from_tokens(cls, tokens: Tensor, eod: int, device: torch.device | str) -> "PackedSeqParams":
        """tokens: int64 [b, s] on the host. A document ends with the token `eod` or at the end of a sample."""
        last = tokens == eod
        last[:, -1] = True
        ends = F.pad(last.flatten().nonzero().flatten() + 1, (1, 0))  # [b, s] -> [t] -> [len(lengths) + 1]
        lengths: list[int] = ends.diff().tolist()
        ends = ends.int()
        on_gpu = torch.device(device).type == "cuda"
        return cls(lengths, ends.pin_memory().to(device, non_blocking=True) if on_gpu else ends)


def core_attention(
    qkv: Tensor,
    dropout_p: float,
    packed_seq_params: PackedSeqParams | None = None,
    dropout_seeds: Tensor | None = None,
    first_head: int = 0,
) -> Tensor:
    """Causal attention, within each document if there are `packed_seq_params`: [s, b, n, 3, d] -> [s, b, n·d].
    Attention within documents takes less time than attention over whole samples, except on a GPU with dropout, where
    each document has separate kernel launches.

    packed_seq_params: None if each sample is one document.
    dropout_seeds: int64 [b, 3], see `mpu.make_dropout_seeds`. A GPU's fused kernels cannot use the seeds. On a GPU, or
        without seeds, masks are drawn from the tracker, whose numbers differ between ranks, because each rank has
        different heads.
    first_head: the number of this rank's first head.
    """
    s, b, n, _, d = qkv.shape
    seeds = dropout_seeds if dropout_p > 0 and kernels.has_seeded_attention(qkv.device.type) else None
    # torch.compile cannot trace a change of the random stream. `ParallelTransformerLayer.__call__` changes the stream
    # for a whole compiled layer.
    draws = dropout_p > 0 and seeds is None and not torch.compiler.is_compiling()
    with current_rng_tracker().fork() if draws else contextlib.nullcontext():
        if packed_seq_params is None and seeds is not None:
            return kernels.seeded_attention(qkv, dropout_p, seeds, ATTENTION_DROPOUT, first_head)
        if packed_seq_params is None or (seeds is None and len(packed_seq_params.lengths) == b):
            return kernels.causal_attention(qkv, dropout_p)
        lengths = packed_seq_params.lengths
        tokens = qkv.transpose(0, 1).reshape(b * s, 1, n, 3, d)  # [s, b, n, 3, d] -> [b, s, n, 3, d] -> [t, 1, n, 3, d]
        if seeds is None:
            y = kernels.varlen_causal_attention(tokens, dropout_p, lengths, packed_seq_params.cu_seqlens_q)
        else:
            parts, start = [], 0
            for part in tokens.split(lengths):
                sample, position = divmod(start, s)
                sample_seeds = seeds[sample : sample + 1]
                parts.append(
                    kernels.seeded_attention(part, dropout_p, sample_seeds, ATTENTION_DROPOUT, first_head, position)
                )
                start += part.size(0)
            y = torch.cat(parts)
    return y.view(b, s, n * d).transpose(0, 1)  # [t, 1, n·d] -> [b, s, n·d] -> [s, b, n·d]
