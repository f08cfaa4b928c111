"""Stage `tables`: the time of each operation that a step consists of, alone, in every way that could compute it.

A way is an arm: a name and a function. Another way, such as a fused kernel, is one more line in its table.
Legend: t tokens, h hidden, v padded vocabulary, b micro-batch, s sequence, n heads, d head size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import mpu
from benchmarks import harness
from benchmarks.arms import linear_shapes, model_drawn_in_place
from benchmarks.first_minutes import Cases, free, is_broken
from benchmarks.generation import our_tokens
from benchmarks.harness import milliseconds
from megatron.gpt2.config import ModelConfig, OptimizerConfig, ParallelConfig
from megatron.gpt2.model.gpt2 import GPT2Model, layer_config
from megatron.gpt2.optimizer.flat_parameters import FlatParameters
from megatron.gpt2.optimizer.gradient_reducer import ParameterGatherer, bucket_size
from megatron.gpt2.optimizer.optimizer import AdamWOptimizer, build_loss_scaler
from mpu import kernels
from mpu.cross_entropy import chunk_size_for

if TYPE_CHECKING:
    from benchmarks.gpu.stages import Setting

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


def tables(setting: Setting, cases: Cases) -> None:
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
        cases.run(f"optimizer, {name}", partial(optimizer_step, setting, name))
    cases.run("decoding, 345M", partial(decoding, setting, "345M"))


def table(setting: Setting, arms: Arms, flops: float = 0.0) -> dict[str, dict[str, Any]]:
    """Milliseconds of each arm, TFLOP/s if `flops` are given, and on a GPU the peak of the memory above what was
    allocated before. An arm that this machine cannot compute has an entry "failed"."""
    found: dict[str, dict[str, Any]] = {}
    on_gpu = setting.device.type == "cuda"
    for name, work in arms.items():
        try:
            if on_gpu:
                torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated() if on_gpu else 0
            ms = milliseconds(work, setting.device, setting.repeats)
        except Exception as error:
            if is_broken(error):
                raise
            found[name] = {"failed": harness.without_paths(f"{type(error).__name__}: {error}".splitlines()[0])}
            free()
            continue
        found[name] = {"ms": ms, **({"tflops": 1e-9 * flops / ms} if flops else {})}
        if on_gpu:
            found[name]["peak_mb"] = (torch.cuda.max_memory_allocated() - before) / 2**20
    return found


def random(setting: Setting, *shape: int, grad: bool = False) -> Tensor:
    """bf16 numbers on the device."""
    return torch.randn(*shape, device=setting.device).bfloat16().requires_grad_(grad)


def ids(setting: Setting, vocab_size: int, count: int) -> Tensor:
    """[count] int64 as in text: p(id) ∝ 1/(id + 1), so that many repeat."""
    draws = torch.rand(count, device=setting.device, dtype=torch.float64)
    return ((draws * torch.tensor(vocab_size + 1.0).log().item()).exp() - 1).long().clamp(0, vocab_size - 1)


def shape_of(setting: Setting, name: str) -> tuple[ModelConfig, int, int]:
    """The model `name`, its vocabulary, and v."""
    model = setting.problem(name).model
    assert model.vocab_size is not None
    return model, model.vocab_size, mpu.padded_vocab_size(model.vocab_size, model.make_vocab_size_divisible_by, 1)


def products(setting: Setting, name: str, t: int) -> dict[str, Any]:
    """Each product of a layer and of the head: forward, input gradient and weight gradient, with the result in bf16, in
    float32, and added to a float32 sum, by the reducer's way and by the product itself."""
    model, _, v = shape_of(setting, name)
    found = {}
    for layer, (rows, columns) in linear_shapes(model.hidden_size, v).items():
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
    model, b = setting.problem(name).model, 2 if setting.smoke else 32
    s, n = model.max_position_embeddings, model.num_attention_heads
    d = model.hidden_size // n
    qkv = random(setting, s, b, n, 3, d, grad=True)
    q, k, v = qkv.permute(3, 1, 2, 0, 4).unbind(0)  # [s, b, n, 3, d] -> three of [b, n, s, d]

    def forward(backend: SDPBackend, p: float) -> Tensor:
        with sdpa_kernel([backend]):
            return F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)

    def both(backend: SDPBackend, p: float) -> object:
        y = forward(backend, p)
        return torch.autograd.grad(y, qkv, torch.ones_like(y))

    found, flops = {}, 4.0 * b * n * s * s * d
    for p in (0.0, 0.1):
        for which, call, times in (("forward", forward, 1), ("forward and backward", both, 3)):
            arms: Arms = {backend: partial(call, kind, p) for backend, kind in BACKENDS.items()}
            found[f"{which}, dropout {p}"] = table(setting, arms, flops=times * flops)
    ends = torch.arange(0, b * s + 1, s // 4, dtype=torch.int32, device=setting.device)
    packed = random(setting, b * s, 1, n, 3, d)
    documents: Arms = {"ours": lambda: kernels.document_attention(packed, 0.0, [s // 4] * (4 * b), ends)}
    return {**found, "forward, documents of a quarter of the sequence": table(setting, documents)}


def losses(setting: Setting, name: str) -> dict[str, Any]:
    """The head and its cross-entropy over the most tokens, forward with both gradients, by tokens of a chunk; and
    without gradients, as an evaluation has it."""
    (model, vocab_size, v), t = shape_of(setting, name), setting.tokens[-1]
    hidden = random(setting, t, model.hidden_size, grad=True)
    weight = random(setting, v, model.hidden_size, grad=True)
    target, token_weight = ids(setting, vocab_size, t), torch.full((t,), 1 / t, device=setting.device)
    chunks = (16,) if setting.smoke else (1024, 2048, 4096, 8192)
    found: dict[str, Any] = {"default chunk": chunk_size_for(t)}
    for arm, loss in LOSSES.items():

        def both(chunk: int, loss: Any = loss) -> object:
            return torch.autograd.grad(loss(hidden, weight, target, token_weight, vocab_size, chunk), [hidden, weight])

        alone = torch.no_grad()(partial(loss, hidden, weight, target, token_weight, vocab_size))
        for which, call, count in (("with gradients", both, 3), ("without gradients", alone, 1)):
            arms: Arms = {f"chunks of {chunk}": partial(call, chunk) for chunk in chunks}
            found[f"{arm}, {which}"] = table(setting, arms, flops=count * 2.0 * t * v * model.hidden_size)
    return found


def embedding_gradient(setting: Setting, name: str) -> dict[str, Any]:
    """The rows of a micro-batch added to the float32 gradient of the word embeddings."""
    (model, vocab_size, v), t = shape_of(setting, name), setting.tokens[-1]
    rows, gradients = ids(setting, vocab_size, t), random(setting, t, model.hidden_size)
    total = torch.zeros(v, model.hidden_size, device=setting.device)
    backward = torch.ops.aten.embedding_dense_backward
    arms: Arms = {
        "index_put_": lambda: total.index_put_((rows,), gradients.float(), accumulate=True),
        "embedding_dense_backward": lambda: total.add_(backward(gradients, rows, v, -1, False)),
        "embedding_dense_backward in float32": lambda: total.add_(backward(gradients.float(), rows, v, -1, False)),
        "index_add_, in any order": lambda: total.index_add_(0, rows, gradients.float()),
    }
    return {"distinct tokens": rows.unique().numel(), "arms": table(setting, arms)}


def drawn(setting: Setting, name: str) -> GPT2Model:
    """The model `name` on the device, in float32."""
    config = setting.problem(name).model
    return model_drawn_in_place(config, layer_config(config, device=setting.device))


def optimizer_step(setting: Setting, name: str) -> dict[str, Any]:
    """Milliseconds of the optimizer's step in bf16, and of its norm and its rounding alone; the rest is AdamW."""
    device, config = setting.device, OptimizerConfig()
    model = drawn(setting, name)
    flat = FlatParameters(model, torch.bfloat16, bucket_size=bucket_size(ParallelConfig().ddp_bucket_size, 1))
    scaler = build_loss_scaler(config, torch.bfloat16, device)
    rates = torch.tensor([1e-4, 1e-4])
    optimizer = AdamWOptimizer(flat, ParameterGatherer(flat, model, None), config, scaler, rates)
    for index in range(len(flat.buckets)):
        flat.bucket_grads(index).fill_(1e-3)
    grads = flat.owned_grads()
    split, whole = ([g for g, o in zip(grads, flat.owned, strict=True) if o.is_split is kind] for kind in (True, False))
    count = flat.params.numel()
    with mock.patch.object(flat, "free_grads"):  # the same ones for every step
        step_ms = milliseconds(optimizer.step, device, setting.repeats)
    works: Arms = {
        "norm_ms": lambda: mpu.squared_norm(split, whole, device),
        "norm_by_foreach_ms": lambda: torch.stack(torch._foreach_norm(grads)).norm(),
        "write_back_ms": optimizer.write_back,
    }
    found = {name: milliseconds(work, device, setting.repeats) for name, work in works.items()}
    # Read and written: 28 bytes by AdamW and 4 by gradients that it writes back, 4 by the norm, 6 by the rounding.
    moved = {"bytes_per_parameter": 42, "gb_per_s": 42e-6 * count / step_ms}
    return {"parameters": count, "ranges": len(flat.owned), "step_ms": step_ms, **found, **moved}


def decoding(setting: Setting, name: str) -> dict[str, Any]:
    """Milliseconds of a further token of 1 and of 8 texts in bf16. A kernel that plans each new length alike costs most
    with its first tokens, so there are few."""
    model = drawn(setting, name).bfloat16().eval()
    prompt, new = (8, 4) if setting.smoke else (512, 16)
    found: dict[str, Any] = {}
    for b in (1, 8):
        ends = our_tokens(model, torch.randint(model.vocab_size, (b, prompt)), new)[1][1:]  # the prompt is read
        ms = [1000 * (end - start) for start, end in zip(ends, ends[1:], strict=False)]
        found[f"{b} texts"] = {"ms": sorted(ms)[len(ms) // 2], "first_ms": ms[0], "most_ms": max(ms)}
    return found
