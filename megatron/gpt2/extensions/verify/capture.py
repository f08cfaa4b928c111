"""Hooks that capture the tensors of a training step as shards of global tensors.

The ranks do not communicate: each shard has its offset in the global tensor.

Legend: b samples of a micro-batch, s sequence, w width, n heads, d head size, v vocabulary, tp tensor-parallel size.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data_utils.command_line import missing_package, require
from data_utils.samplers import micro_batch_starts
from megatron.gpt2.checkpoint.sharded_state import sharded_state_dict
from megatron.gpt2.dist.gathering import all_reduce_over_data_and_pipeline, sum_losses
from megatron.gpt2.extensions.verify.trace import TensorKey, TensorShard
from megatron.gpt2.formats.nanogpt_and_dcp import openai_name, to_openai
from megatron.gpt2.hooks import Hook, Hooks
from megatron.gpt2.model.gpt2 import TIED_WEIGHT, model_partition_specs
from megatron.gpt2.optimizer.optimizer import MOMENTS
from megatron.gpt2.optimizer.param_and_grad_buffer import ParamShard
from megatron.gpt2.train.train_step import train_step
from megatron.gpt2.train.trainer import Trainer
from mpu import kernels


class CapturePoint(NamedTuple):
    """A tensor of the forward pass to capture: the output of `module` of a layer or, with `made_by`, its input.

    made_by: the name of the function that computed the input.
    split: each tensor-parallel rank has a shard of the width for the whole sequence.
    gradient: also capture the gradient, which is complete on each rank.
    """

    module: str = ""
    made_by: str = ""
    split: bool = False
    gradient: bool = False


# the outputs of a whole layer, of the embeddings and of the final norm
MODULE_OUTPUT = CapturePoint(gradient=True)
# the tensors to capture of a layer, in the order of their computation
CAPTURE_POINTS = (
    CapturePoint("input_layernorm", gradient=True),
    CapturePoint("attention.query_key_value", split=True),
    CapturePoint("attention.dense", made_by="attention.core", split=True),
    CapturePoint("attention.dense"),
    CapturePoint("post_attention_layernorm", gradient=True),
    CapturePoint("mlp.dense_h_to_4h", split=True),
    CapturePoint("mlp.dense_4h_to_h", made_by="mlp.gelu", split=True),
    CapturePoint("mlp.dense_4h_to_h"),
    MODULE_OUTPUT,
)


def first_index(layer: int) -> int:
    """Return the index of a layer's first tensor in the forward pass. The embeddings have index 0."""
    return 1 + layer * len(CAPTURE_POINTS)


class Capture(Hook):
    """Captures the tensors of each step of `trainer`, and calls `take` with each shard while the step runs.

    Only the output of a compiled layer is captured, without the tensors inside the layer. Recomputed tensors are
    captured only once.
    """

    def __init__(self, trainer: Trainer, take: Callable[[TensorShard], None]) -> None:
        self._trainer, self._take, self._model = trainer, take, trainer.state.model
        self._tensor_parallel_size = trainer.parallel.tensor_model_parallel_size
        self._rank = trainer.parallel.tensor_model_parallel_rank
        self._specs = model_partition_specs(trainer.config.model, self._tensor_parallel_size)
        self._step = self._first_layer = self._first_sample = 0
        self._scale = 1.0
        self._micro_batch_counts: Counter[int] = Counter()  # the finished micro-batches of a chunk, by its first layer
        self._losses: list[Tensor] = []
        self._is_forward = False

    def steps(self, count: int) -> None:
        """Capture the weights, and then `count` training steps."""
        trainer, optimizer = dataclasses.replace(self._trainer, hooks=Hooks([self])), self._trainer.state.optimizer
        self._model.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        self._model.register_forward_hook(self._after_forward)
        self._hook_model()
        self._take_parameters()
        for self._step in range(1, count + 1):
            self._micro_batch_counts.clear()
            self._losses.clear()
            self._scale, rate = float(optimizer.scaler.scale), float(optimizer.learning_rate)
            trainer.progress.loss_sum.zero_()
            train_step(trainer)
            trainer.progress.count_step(trainer.current_global_batch_size)
            self._take_scalar("scalar", "gradient norm", 0, optimizer.grad_norm)
            self._take_scalar("scalar", "skipped", 1, optimizer.found_inf)
            self._take_scalar("scalar", "learning rate", 2, rate)
            self._take_scalar("scalar", "steps of the optimizer", 3, optimizer.state_dict()["adam_steps"])
            self._take_parameters()
            for state in optimizer.state_shards():
                if state.kind in MOMENTS:
                    self._take_state(state)

    def _hook_model(self) -> None:
        model, body = self._model, self._model.transformer
        body.register_forward_pre_hook(lambda module, args: self._capture("embeddings", 0, args[0]))
        for number, layer in enumerate(body.layers):
            if layer is not None and model.is_compiled:  # Hooks on the layer's modules would be compiled, too.
                layer._compiled_call_impl = self._capture_compiled(layer._compiled_call_impl, number)
            elif layer is not None:
                self._hook_layer(layer, number)
        if model.has_head:
            self._hook("transformer.final_layernorm", first_index(len(body.layers)), body.final_layernorm)

    def _hook(self, name: str, index: int, module: nn.Module, point: CapturePoint = MODULE_OUTPUT) -> None:
        if point.made_by:
            module.register_forward_pre_hook(lambda module, args: self._capture(name, index, args[0], point))
        else:
            module.register_forward_hook(lambda module, args, out: self._capture(name, index, out, point))

    def _hook_layer(self, layer: nn.Module, number: int, name_of: Callable[[str], str] = str) -> None:
        for index, point in enumerate(CAPTURE_POINTS, first_index(number)):
            part = point.made_by or point.module
            name = f"transformer.layers.{number}" + (f".{part}" if part else "")
            module = layer.get_submodule(name_of(point.module))
            self._hook(name, index, module, point)

    def _capture_compiled(self, compiled: Any, number: int) -> Callable[..., Tensor]:
        def call(*args: Any, **kwargs: Any) -> Tensor:
            out = kernels.sum_terms(compiled(*args, **kwargs))
            self._capture(f"transformer.layers.{number}", first_index(number + 1) - 1, out)
            return out

        return call

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Find the first sample of the micro-batch, and capture the model's inputs. Each chunk of layers gets the
        micro-batches in order."""
        trainer, layer_range = self._trainer, kwargs.get("layer_range")
        self._first_layer = 0 if layer_range is None else layer_range.start
        starts = micro_batch_starts(
            trainer.current_global_batch_size,
            trainer.config.train.micro_batch_size,
            trainer.parallel.data_parallel_rank,
            trainer.parallel.data_parallel_size,
            contiguous=bool(trainer.config.parallel.exact_layouts),
        )
        self._first_sample = int(starts[self._micro_batch_counts[self._first_layer]])
        self._micro_batch_counts[self._first_layer] += 1
        self._is_forward = True
        for index, name in enumerate(("sample_ids", "tokens", "labels", "token_weight")):
            value = kwargs.get(name)
            if self._first_layer == 0 and value is not None:
                value = self._unscale(value) if value.is_floating_point() else value
                self._take_samples("input", name, index, value, self._first_sample)

    def _after_forward(self, module: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
        self._is_forward = False
        if out.dim() == 0:  # `out` is the loss, not the hidden states of a pipeline stage.
            self._losses.append(out.detach())

    def _capture(
        self, name: str, index: int, x: Tensor | Sequence[Tensor], point: CapturePoint = MODULE_OUTPUT
    ) -> None:
        """Capture x, [s, b, w] or its shard, and later also the gradient of x if `point` asks for gradients."""
        if not self._is_forward or (name == "embeddings" and self._first_layer > 0):
            return
        x = x if isinstance(x, Tensor) else torch.cat(list(x), dim=-1)  # A layer of --exact-layouts returns a tuple.
        cut = 2 if point.split else 1 if self._model.sequence_parallel else None
        self._take_samples("activation", name, index, x.detach().transpose(0, 1), self._first_sample, cut)
        if point.gradient and x.requires_grad:
            take = functools.partial(self._take_samples, "activation gradient", f"gradient of {name}", -index)
            first = self._first_sample
            x.register_hook(lambda grad: take(self._unscale(grad).transpose(0, 1), first, cut))

    def _unscale(self, grad: Tensor) -> Tensor:
        return grad if self._scale == 1 else grad.float() / self._scale

    def _take_samples(self, kind: str, name: str, index: int, x: Tensor, first: int, cut: int | None = None) -> None:
        """Capture x, [b, s, w] or [b, ...], whose rows are the samples from number `first` on.

        cut: the dimension that is split over the tensor-parallel ranks.
        """
        offset, whole = [first] + [0] * (x.dim() - 1), [self._trainer.current_global_batch_size, *x.shape[1:]]
        if cut is not None:
            offset[cut], whole[cut] = self._rank * x.shape[cut], self._tensor_parallel_size * x.shape[cut]
        key, writes = TensorKey(self._step, kind, index, name), cut is not None or self._rank == 0
        self._take(TensorShard(key, x, tuple(offset), tuple(whole), writes))

    def _take_scalar(self, kind: str, name: str, index: int, value: Tensor | float) -> None:
        number = torch.as_tensor(value, dtype=torch.float32).detach().view(1)
        self._take(
            TensorShard(TensorKey(self._step, kind, index, name), number, (0,), (1,), self._trainer.parallel.rank == 0)
        )

    def on_pre_optimizer_step(self, trainer: Trainer) -> None:
        """Capture the loss and the gradients, after their reduction and before clipping."""
        losses = torch.stack(self._losses or [torch.zeros((), device=self._trainer.device)]) / self._scale
        self._take_scalar(
            "loss", "loss", 0, all_reduce_over_data_and_pipeline([sum_losses(losses)], self._trainer.parallel)
        )
        buffer = self._trainer.state.buffer
        for name in buffer.ranges:
            start = buffer.owned_part(name)[2]
            self._take_state(ParamShard("gradient", name, self._unscale(buffer.owned_grad(name)), start))

    def _take_parameters(self) -> None:
        """Capture the weights of the model."""
        self._trainer.state.param_gather.finish_param_sync()
        for name, parameter in self._model.named_parameters():
            self._take_state(ParamShard("parameter", name, parameter.detach().view(-1)))

    def _take_state(self, state: ParamShard) -> None:
        """Capture the rank's shard of a parameter, or of its gradient or moment."""
        kind, name, index = state.kind, state.name, list(self._specs).index(state.name)
        key = TensorKey(
            self._step,
            "moment" if kind in MOMENTS else kind,
            -index if kind == "gradient" else index,  # Backward computes the last tensor first.
            name if kind == "parameter" else f"{kind} of {name}",
        )
        is_shard = self._trainer.state.buffer.is_sharded and kind != "parameter"
        is_copy = name == TIED_WEIGHT and not self._model.has_embeddings
        # A replicated tensor is the same on every rank, so it counts as rank 0's tensor.
        rank = self._rank if self._specs[name].dim is not None else 0
        writes = rank == self._rank and not is_copy and (is_shard or self._trainer.parallel.data_parallel_rank == 0)
        for shard in sharded_state_dict(
            [state], self._specs, tp_rank=rank, tp_size=self._tensor_parallel_size
        ).values():
            if shard.data.numel():
                self._take(TensorShard(key, shard.data, shard.global_offset, shard.global_shape, writes))


class TransformersCapture(Capture):
    """Captures the steps of `trainer`, with the forward pass and the gradients of transformers' GPT-2, on one rank."""

    def _hook_model(self) -> None:
        """Replace the model's forward pass. Raises ValueError if transformers is not installed, or if its GPT-2 does
        not support a flag of the run."""
        trainer, model, config = self._trainer, self._model, self._trainer.config.model
        try:
            from transformers import GPT2Config, GPT2LMHeadModel
        except ImportError as error:
            raise missing_package("--against huggingface", error.name, "hf") from None
        require(
            not config.has_dropout,
            "--against huggingface: transformers draws different masks: give --hidden-dropout 0 --attention-dropout 0",
        )
        for flag, is_given in (
            ("--reset-attention-mask", trainer.config.data.reset_attention_mask),
            ("--reset-position-ids", trainer.config.data.reset_position_ids),
        ):
            require(not is_given, f"--against huggingface: transformers' GPT-2 has no {flag}: leave it out")
        hf_model = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=model.vocab_size,
                n_positions=config.max_position_embeddings,
                n_embd=config.hidden_size,
                n_layer=config.num_layers,
                n_head=config.num_attention_heads,
                n_inner=config.ffn_hidden_size,
                activation_function={"tanh": "gelu_new", "erf": "gelu"}[config.gelu],
                layer_norm_epsilon=config.layernorm_epsilon,
                bos_token_id=None,
                eos_token_id=None,
            )
        ).to(trainer.device, trainer.context.dtype)
        hf_model.eval()

        def forward(tokens: Tensor, labels: Tensor, token_weight: Tensor, **others: Any) -> Tensor:
            """Compute the loss like `GPT2Model.forward`. The model's own parameters get the gradients."""
            weights = {}
            for name, p in model.named_parameters():
                unpadded = self._specs[name].without_padding(p, 0, 1)
                weights[f"transformer.{openai_name(name)}"] = to_openai(unpadded, name, config.num_attention_heads)
            logits = torch.func.functional_call(hf_model, weights, (tokens,)).logits.float()  # [b, s, v]
            losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
            return (losses * token_weight.flatten()).sum()

        model.forward = forward  # type: ignore[method-assign, assignment]
        body = hf_model.transformer
        self._hook("embeddings", 0, body.drop)
        for number, layer in enumerate(body.h):
            self._hook_layer(layer, number, openai_name)
        self._hook("transformer.final_layernorm", first_index(len(body.h)), body.ln_f)

    def _capture(self, name: str, index: int, x: Any, point: CapturePoint = MODULE_OUTPUT) -> None:
        x = x[0] if isinstance(x, tuple) else x  # A layer returns a tuple in older versions of transformers.
        if name.endswith(".query_key_value"):  # [b, s, 3 n d] -> [b, s, n 3 d]
            x = x.unflatten(-1, (3, self._trainer.config.model.num_attention_heads, -1)).transpose(-3, -2).flatten(-3)
        super()._capture(name, index, x.transpose(0, 1), point)
