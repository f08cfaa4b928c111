"""Stage `tables`: the time of each operation that a step consists of, alone, in every way that could compute it.

A way is an arm: a name and a function. Another way, such as a fused kernel, is one more line in its table.
Legend: t tokens, h hidden, v padded vocabulary, b micro-batch, s sequence, n heads, d head size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import mpu
from benchmarks import report
from benchmarks.gpu import model_tables
from benchmarks.gpu.cases import Cases, free, is_broken
from benchmarks.gpu.setting import Setting
from benchmarks.timing import milliseconds
from mpu import kernels
from mpu.cross_entropy import chunk_size_for

Arms = dict[str, Callable[[], Any]]

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "fused": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "formula": SDPBackend.MATH,
}
# hidden [t, h], weight [v, h], target [t] int64, token_weight [t], size of the vocabulary, tokens of a chunk -> loss
LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor, int, int], Tensor]] = {
    "ours": lambda hidden, weight, target, token_weight, vocab_size, chunk: mpu.vocab_parallel_linear_cross_entropy(
        hidden, weight, target, token_weight, vocab_size=vocab_size, chunk_size=chunk
    )
}


def run(setting: Setting, cases: Cases) -> None:
    """Its cases, the most valuable first."""
    mpu.initialize_model_parallel(1)
    for name in setting.names:
        cases.run(f"cross-entropy, {name}", partial(losses, setting, name))
        cases.run(f"attention, {name}", partial(attention, setting, name))
    for tokens in reversed(setting.tokens):
        for name in setting.names:
            cases.run(f"products, {name}, {tokens} tokens", partial(products, setting, name, tokens))
    for name in setting.names:
        cases.run(f"gradient of the embedding, {name}", partial(embedding_gradient, setting, name))
        cases.run(f"optimizer, {name}", partial(model_tables.step, setting, name))
    cases.run("decoding, 345M", partial(model_tables.decoding, setting, "345M", BACKENDS))


def table(setting: Setting, arms: Arms, flops: float = 0.0, moved: float = 0.0) -> dict[str, dict[str, Any]]:
    """Milliseconds of each arm, and TFLOP/s or GB/s where `flops` or bytes `moved` are given. An arm that this machine
    cannot compute has an entry "failed"."""
    found: dict[str, dict[str, Any]] = {}
    for name, work in arms.items():
        try:
            before = peak_of(setting)
            ms = milliseconds(work, setting.device, setting.repeats)
        except Exception as error:
            if is_broken(error):
                raise
            found[name] = {"failed": report.without_paths(f"{type(error).__name__}: {error}".splitlines()[0])}
            free()
            continue
        found[name] = {
            "ms": ms,
            **({"tflops": 1e-9 * flops / ms} if flops else {}),
            **({"gb_per_s": 1e-6 * moved / ms} if moved else {}),
            **({"peak_mb": (peak_of(setting, since=before)) / 2**20} if setting.device.type == "cuda" else {}),
        }
    return found


def peak_of(setting: Setting, since: int | None = None) -> int:
    """Without `since`: bytes that are allocated now, and the peak begins anew. With it: how far the peak is above."""
    if setting.device.type != "cuda":
        return 0
    if since is not None:
        return torch.cuda.max_memory_allocated() - since
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def random(setting: Setting, *shape: int, grad: bool = False) -> Tensor:
    """bf16 numbers on the device."""
    return torch.randn(*shape, device=setting.device).bfloat16().requires_grad_(grad)


def ids(setting: Setting, vocab_size: int, count: int) -> Tensor:
    """[count] int64 as in text: p(id) ∝ 1/(id + 1), so that many repeat."""
    draws = torch.rand(count, device=setting.device, dtype=torch.float64)
    return ((draws * torch.tensor(vocab_size + 1.0).log().item()).exp() - 1).long().clamp(0, vocab_size - 1)


def padded(setting: Setting, name: str) -> int:
    """v, the rows of the word embeddings."""
    model = setting.model(name)
    assert model.vocab_size is not None
    return mpu.padded_vocab_size(model.vocab_size, model.make_vocab_size_divisible_by, 1)


def products(setting: Setting, name: str, t: int) -> dict[str, Any]:
    """Each product of a layer and of the head: forward, input gradient and weight gradient, with the result in bf16, in
    float32, and added to a float32 sum."""
    h = setting.model(name).hidden_size
    shapes = {
        "query_key_value": (3 * h, h),
        "dense": (h, h),
        "h_to_4h": (4 * h, h),
        "4h_to_h": (h, 4 * h),
        "head": (padded(setting, name), h),
    }
    found = {}
    for layer, (rows, columns) in shapes.items():
        x, weight, dy = random(setting, t, columns), random(setting, rows, columns), random(setting, t, rows)
        for which, a, b in (("forward", x, weight.t()), ("dX", dy, weight), ("dW", dy.t(), x)):
            arms: Arms = {"bf16": partial(torch.mm, a, b), "fp32": partial(torch.mm, a, b, out_dtype=torch.float32)}
            if which == "dW":
                total = torch.zeros(rows, columns, device=setting.device)
                arms["bf16, then added"] = partial(add_product, total, a, b)
                arms["added by the product"] = partial(torch.addmm, total, a, b, out_dtype=torch.float32, out=total)
            found[f"{layer}, {which}"] = table(setting, arms, flops=2.0 * t * rows * columns)
    return found


def add_product(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """As the reducer adds a gradient that autograd has made."""
    return total.add_(a @ b)


def attention(setting: Setting, name: str) -> dict[str, Any]:
    """Causal attention of a micro-batch of 32, forward and with its backward, by kernel, with and without dropout.
    FLOPs are counted in full, as in MFU."""
    model, b = setting.model(name), 2 if setting.smoke else 32
    s, n = model.max_position_embeddings, model.num_attention_heads
    d = model.hidden_size // n
    qkv = random(setting, s, b, n, 3, d, grad=True)
    q, k, v = qkv.permute(3, 1, 2, 0, 4).unbind(0)  # [s, b, n, 3, d] -> three of [b, n, s, d]
    found = {}
    for p in (0.0, 0.1):

        def forward(backend: SDPBackend, p: float = p) -> Tensor:
            with sdpa_kernel([backend]):
                return F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)

        def both(backend: SDPBackend, forward: Callable[[SDPBackend], Tensor] = forward) -> object:
            y = forward(backend)
            return torch.autograd.grad(y, qkv, torch.ones_like(y))

        flops = 4.0 * b * n * s * s * d
        for which, call, times in (("forward", forward, 1), ("forward and backward", both, 3)):
            found[f"{which}, dropout {p}"] = table(
                setting, {backend: partial(call, kind) for backend, kind in BACKENDS.items()}, flops=times * flops
            )
    lengths = [s // 4] * (4 * b)
    ends = torch.arange(0, b * s + 1, s // 4, dtype=torch.int32, device=setting.device)
    packed = random(setting, b * s, 1, n, 3, d)
    found["forward, documents of a quarter of the sequence"] = table(
        setting, {"ours": lambda: kernels.document_attention(packed, 0.0, lengths, ends)}
    )
    return found


def losses(setting: Setting, name: str) -> dict[str, Any]:
    """The head and its cross-entropy over the most tokens, forward with both gradients, by tokens of a chunk; and
    without gradients, as an evaluation has it."""
    model, t = setting.model(name), setting.tokens[-1]
    assert model.vocab_size is not None
    v, vocab_size = padded(setting, name), model.vocab_size
    hidden = random(setting, t, model.hidden_size, grad=True)
    weight = random(setting, v, model.hidden_size, grad=True)
    target, token_weight = ids(setting, vocab_size, t), torch.full((t,), 1 / t, device=setting.device)
    chunks = (16,) if setting.smoke else (1024, 2048, 4096, 8192)
    found: dict[str, Any] = {"default chunk": chunk_size_for(t)}
    for arm, loss in LOSSES.items():

        def both(chunk: int, loss: Any = loss) -> object:
            return torch.autograd.grad(loss(hidden, weight, target, token_weight, vocab_size, chunk), [hidden, weight])

        def alone(chunk: int, loss: Any = loss) -> object:
            with torch.no_grad():
                return loss(hidden, weight, target, token_weight, vocab_size, chunk)

        for which, call, products_of in (("with gradients", both, 3), ("without gradients", alone, 1)):
            found[f"{arm}, {which}"] = table(
                setting,
                {f"chunks of {chunk}": partial(call, chunk) for chunk in chunks},
                flops=products_of * 2.0 * t * v * model.hidden_size,
            )
    return found


def embedding_gradient(setting: Setting, name: str) -> dict[str, Any]:
    """The rows of a micro-batch added to the float32 gradient of the word embeddings."""
    model, t = setting.model(name), setting.tokens[-1]
    assert model.vocab_size is not None
    v, rows = padded(setting, name), ids(setting, model.vocab_size, t)
    gradients, total = (
        random(setting, t, model.hidden_size),
        torch.zeros(padded(setting, name), model.hidden_size, device=setting.device),
    )
    return {
        "distinct tokens": rows.unique().numel(),
        "arms": table(
            setting,
            {
                "index_put_": lambda: total.index_put_((rows,), gradients.float(), accumulate=True),
                "embedding_dense_backward": lambda: total.add_(
                    torch.ops.aten.embedding_dense_backward(gradients, rows, v, -1, False)
                ),
                "embedding_dense_backward in float32": lambda: total.add_(
                    torch.ops.aten.embedding_dense_backward(gradients.float(), rows, v, -1, False)
                ),
                "index_add_, in any order": lambda: total.index_add_(0, rows, gradients.float()),
            },
        ),
    }
