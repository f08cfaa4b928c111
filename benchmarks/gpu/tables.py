"""Stage `tables`: the time of each operation of a training step by itself, with all implementations that torch has.

Each implementation, for example a fused kernel, is one line of a table: a name and a function.
Legend: b micro-batch, s sequence, t tokens, h hidden, v padded vocabulary, n heads, d head size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import mpu
from benchmarks import harness
from benchmarks.gpu_first_minutes import CaseRecorder, is_broken
from benchmarks.harness import milliseconds
from mpu.kernels.layer import linear_gelu, linear_gelu_backward
from mpu.kernels.triton_kernel import TritonKernel

if TYPE_CHECKING:
    from benchmarks.gpu.stages import StageConfig

Arms = dict[str, Callable[[], Any]]

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "fused": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "formula": SDPBackend.MATH,
}


def tables(cfg: StageConfig, cases: CaseRecorder) -> None:
    """Run the cases of the stage `tables`. Each line of a table is a case."""
    mpu.initialize_model_parallel(1)
    for name in cfg.names:
        cross_entropy(cfg, cases, name)
        attention(cfg, cases, name)
    for name in cfg.names:  # These tables take longer, so the time limit should end them first.
        head(cfg, cases, name)
        mlp(cfg, cases, name)


def time_arms(cfg: StageConfig, cases: CaseRecorder, what: str, arms: Arms, flops: float = 0.0) -> None:
    """Measure each arm: milliseconds, TFLOP/s if `flops` is given, and on a GPU the peak of additional memory."""
    on_gpu = cfg.device.type == "cuda"

    def measure(work: Callable[[], Any]) -> dict[str, Any]:
        before = torch.cuda.memory_allocated() if on_gpu else 0
        try:
            ms = milliseconds(work, cfg.device, cfg.repeats)
        except (RuntimeError, ImportError, ValueError) as error:
            if is_broken(error):
                raise
            return {"unsupported": harness.strip_paths(f"{error}".splitlines()[0])}
        found = {"ms": ms, **({"tflops": 1e-9 * flops / ms} if flops else {})}
        return found | ({"peak_mb": (torch.cuda.max_memory_allocated() - before) / 2**20} if on_gpu else {})

    for name, work in arms.items():
        cases.run(f"{what}: {name}", partial(measure, work))


def random_tensor(cfg: StageConfig, *shape: int, grad: bool = False) -> Tensor:
    """Draw bf16 numbers on the device."""
    return torch.randn(*shape, device=cfg.device).bfloat16().requires_grad_(grad)


def sizes(cfg: StageConfig, name: str) -> tuple[int, int, int]:
    """Return t, h and v of a micro-batch of 32 samples."""
    workload = cfg.workload(name)
    v = mpu.padded_vocab_size(workload.vocab_size, workload.model.make_vocab_size_divisible_by, 1)
    return workload.micro_batch_size * workload.seq_length, workload.hidden_size, v


def cross_entropy(cfg: StageConfig, cases: CaseRecorder, name: str) -> None:
    """Time forward and backward of the head and the loss for 32 samples: ours with different chunk sizes, and torch's.
    The FLOPs are those of three matrix products."""
    (t, h, v), size = sizes(cfg, name), cfg.workload(name).vocab_size
    hidden, weight = random_tensor(cfg, t, h, grad=True), random_tensor(cfg, v, h, grad=True)
    target = torch.randint(size, (t,), device=cfg.device)
    token_weight = torch.full((t,), 1 / t, device=cfg.device)

    def ours(chunk_size: int) -> object:
        loss = mpu.vocab_parallel_linear_cross_entropy(
            hidden, weight, target, token_weight, vocab_size=size, chunk_size=chunk_size
        )
        return torch.autograd.grad(loss, (hidden, weight))

    def by_torch() -> object:
        loss = F.cross_entropy(F.linear(hidden, weight)[:, :size].float(), target)
        return torch.autograd.grad(loss, (hidden, weight))

    arms: Arms = {f"{chunk} tokens": partial(ours, chunk) for chunk in (t // 16, t // 4, t)}
    time_arms(cfg, cases, f"cross-entropy, {name}", {**arms, "torch": by_torch}, flops=6.0 * t * h * v)


def attention(cfg: StageConfig, cases: CaseRecorder, name: str) -> None:
    """Time each kernel of causal attention for a micro-batch of 32: forward, and forward with backward, each with and
    without dropout. FLOPs include the masked half, as in MFU."""
    model, b = cfg.workload(name).model, 2 if cfg.smoke else 32
    s, n = model.max_position_embeddings, model.num_attention_heads
    d = model.hidden_size // n
    qkv = random_tensor(cfg, s, b, n, 3, d, grad=True)
    q, k, v = qkv.permute(3, 1, 2, 0, 4).unbind(0)  # [s, b, n, 3, d] -> three of [b, n, s, d]

    def forward(backend: SDPBackend, p: float) -> Tensor:
        with sdpa_kernel([backend]):
            return F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)

    def both(backend: SDPBackend, p: float) -> object:
        y = forward(backend, p)
        return torch.autograd.grad(y, qkv, torch.ones_like(y))

    flops = 4.0 * b * n * s * s * d
    for p in (0.0, 0.1):
        for which, call, times in (("forward", forward, 1), ("forward and backward", both, 3)):
            arms: Arms = {backend: partial(call, kind, p) for backend, kind in BACKENDS.items()}
            time_arms(cfg, cases, f"attention, {name}, {which}, dropout {p}", arms, flops=times * flops)


def head(cfg: StageConfig, cases: CaseRecorder, name: str) -> None:
    """Time the logits of 32 samples: in bf16, and in fp8 with one scale for each matrix. The time in fp8 includes the
    rounding of both matrices."""
    t, h, v = sizes(cfg, name)
    hidden, weight = random_tensor(cfg, t, h), random_tensor(cfg, v, h)

    def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
        scale = x.abs().amax().float() / torch.finfo(torch.float8_e4m3fn).max
        return (x / scale).to(torch.float8_e4m3fn), scale

    def in_fp8() -> Tensor:
        (x, x_scale), (w, w_scale) = rounded(hidden), rounded(weight)
        return torch._scaled_mm(x, w.t(), x_scale, w_scale, out_dtype=torch.bfloat16, use_fast_accum=True)

    arms: Arms = {"bf16": partial(F.linear, hidden, weight), "fp8": in_fp8}
    time_arms(cfg, cases, f"head, {name}", arms, flops=2.0 * t * h * v)


def mlp(cfg: StageConfig, cases: CaseRecorder, name: str) -> None:
    """Time `linear_gelu` and `linear_gelu_backward` for 32 samples: torch's product and a kernel for GELU, one Triton
    kernel, cuBLASLt if nvmath-python is installed, and for the first model torch.compile with its own choice."""
    t, h, _ = sizes(cfg, name)
    x, up, bias = random_tensor(cfg, t, h), random_tensor(cfg, 4 * h, h), random_tensor(cfg, 4 * h)
    down, z = random_tensor(cfg, h, 4 * h), random_tensor(cfg, t, 4 * h)

    def forward() -> object:
        z = F.linear(x, up, bias)
        return z, F.gelu(z, approximate="tanh")

    def backward() -> object:
        dz = torch.ops.aten.gelu_backward(x @ down, z, approximate="tanh")
        return dz, dz.sum(0)

    def call_supported(kernel: TritonKernel[Any, Any], *args: Any) -> None:
        if kernel.kernel(*args) is NotImplemented:
            raise NotImplementedError("the kernel does not support this GPU")

    def by_cublaslt(epilogue: str, a: Tensor, b: Tensor, **inputs: Tensor) -> Callable[[], Any]:
        @cache
        def product() -> Any:
            from nvmath.linalg import advanced  # type: ignore[import-not-found]

            planned = advanced.Matmul(a, b)
            planned.plan(epilog=advanced.MatmulEpilog[epilogue], epilog_inputs=inputs)
            return planned

        return lambda: product().execute()

    for kernel, args, plain, cublaslt in (
        (linear_gelu, (x, up, bias), forward, by_cublaslt("GELU_AUX_BIAS", up, x.t(), bias=bias)),
        (linear_gelu_backward, (x, down, z), backward, by_cublaslt("DGELU_BGRAD", down.t(), x.t(), gelu_aux=z.t())),
    ):
        arms: Arms = {
            "torch and Triton": partial(kernel.reference, *args, "tanh"),
            "Triton": partial(call_supported, kernel, *args, "tanh"),
            "cuBLASLt": cublaslt,
        }
        if name == cfg.names[0]:  # The choice takes up to a minute.
            options: dict[str, Any] = {"backend": "eager"} if cfg.smoke else {"mode": "max-autotune-no-cudagraphs"}
            arms["max-autotune"] = torch.compile(plain, **options)
        time_arms(cfg, cases, f"{kernel.name}, {name}", arms, flops=8.0 * t * h * h)
