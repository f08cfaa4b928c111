"""Published bugs of parallel training, each as a small change of the program, and harmless changes.

A change is a function that patches the program with a pytest.MonkeyPatch, which can undo the patch. Ranks call this
function before they build their run.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import mpu
from data_utils import Splits
from megatron.gpt2.model import gpt2
from megatron.gpt2.model.gpt2 import TransformerBlock
from megatron.gpt2.optimizer import bucket_reducer
from megatron.gpt2.optimizer.bucket_reducer import BucketReducer, ParamAllGather
from megatron.gpt2.optimizer.optimizer import MixedPrecisionOptimizer
from megatron.gpt2.optimizer.param_and_grad_buffer import ParamAndGradBuffer
from megatron.gpt2.train import data, train_state, train_step
from megatron.gpt2.train.data import Batch
from megatron.gpt2.train.loop import IterationLogger
from megatron.gpt2.train.trainer import Trainer
from mpu import cross_entropy, grads, kernels, layers, mappings, transformer
from tests.megatron.gpt2.extensions.order import test_order as order
from tests.megatron.gpt2.extensions.order.test_order import changed, extra, replaced
from tests.megatron.gpt2.extensions.verify import planted_faults as faults
from tests.megatron.gpt2.extensions.verify.planted_faults import (
    ACCUMULATED,
    SEQUENCE_PARALLEL,
    SHARDED,
    STAGES,
    TENSOR_PARALLEL,
)

Patch = pytest.MonkeyPatch
Plant = Callable[[Patch], object]
DATA_PARALLEL = "--micro-batch-size 2"
RECOMPUTED = DATA_PARALLEL + " --recompute-granularity full"
MICRO_BATCHES = "--micro-batch-size 1 --pipeline-model-parallel-size 2"
EOD_MASK = "--eod-mask-loss"  # A layout with this flag is compared with a reference run that also has the flag.
LAST = "gradient of transformer.final_layernorm.bias"


class Change(NamedTuple):
    """A change of the program: a bug, or a harmless change.

    source: the thread or paper that reports the bug; empty for a harmless change.
    named: the tensor, group or line that a tool must print.
    ranks: the ranks of a run of `world_size` ranks that have the change.
    flags: the flags of the layout.
    """

    plant: Plant
    flags: str = TENSOR_PARALLEL
    source: str = ""
    named: str = ""
    ranks: tuple[int, ...] = (0, 1)
    world_size: int = 2


def in_trainer(plant: Callable[[Trainer, Patch], None]) -> Plant:
    """Return a change that calls `plant` as soon as the rank has built its trainer."""

    def early(patch: Patch) -> None:
        original = Trainer.__init__

        def build(self: Trainer, **parts: Any) -> None:
            patch.setattr(Trainer, "__init__", original)  # Trainers that a tool builds later are not changed again.
            original(self, **parts)
            plant(self, patch)

        patch.setattr(Trainer, "__init__", build)

    return early


def scaled(factor: float) -> Plant:
    """Return a change that multiplies the gradients of a step by `factor`."""
    return extra(
        BucketReducer,
        "finish_grad_sync",
        lambda _, self: [gradient.mul_(factor) for gradient in self._buffer.owned_grads()],
        after=True,
    )


def without_collectives(module: Any) -> Plant:
    """Return a change that leaves out all all-reduces of a module."""
    return replaced(module, "dist", SimpleNamespace(all_reduce=lambda *args, **options: None))


class WrongGradient(torch.autograd.Function):
    """Return the input in forward, and lose the keys' gradient in backward. qkv: [s, b, n, 3, d]."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor) -> Tensor:
        return qkv.view_as(qkv)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * torch.tensor([1.0, 0.0, 1.0]).view(3, 1)


def is_recomputed() -> int:
    """Return 1 in a backward pass, and otherwise 0."""
    return int(torch._C._current_graph_task_id() != -1)


def untied(original: Any, self: MixedPrecisionOptimizer) -> None:
    """Update all parameters except this stage's copy of the tied matrix."""
    weight = self.buffer.view(self.buffer.params, gpt2.TIED_WEIGHT)
    before = weight.clone()
    original(self)
    weight.copy_(before)


def incomplete_all_reduce(original: Any, x: Tensor, *args: Any, **options: Any) -> Any:
    """Call all-reduce, but let each rank keep the last eight elements of its x."""
    last = x.flatten()[-8:].clone() if x.numel() > 8 else None
    work = original(x, *args, **options)
    if last is not None:
        if work is not None:
            work.wait()
        x.view(-1)[-8:] = last
    return work


def verified(name: str, source: str) -> Change:
    """Return the change that plants the fault `name` of planted_faults.py."""
    fault = faults.FAULTS[name]
    return Change(in_trainer(fault.plant), fault.flags, source, fault.tensor)


def ordered(name: str, source: str) -> Change:
    """Return the change that plants the fault `name` of order/test_order.py."""
    fault = order.FAULTS[name]
    line = order.line_numbers(fault.file, fault.line)[0]
    return Change(
        fault.plant,
        fault.flags + " --micro-batch-size 1",
        source,
        f"{fault.file}:{line}",
        fault.ranks,
        fault.world_size,
    )


BUGS = {
    "mask of the vocabulary's split": Change(
        changed(
            layers,
            "local_ids",
            lambda original, ids, *args: (original(ids, *args)[0], torch.ones_like(ids, dtype=torch.bool)),
        ),
        TENSOR_PARALLEL,
        "arXiv:2506.09280",
        "embeddings",
    ),
    "bias added by every rank": verified("bias added once per rank", "PaddlePaddle/Paddle#35186"),
    "layer norm's gradient not summed": Change(
        replaced(bucket_reducer, "all_reduce_partial_grads", lambda buffer: None),
        SEQUENCE_PARALLEL,
        "NVIDIA/Megatron-LM#1446",
        LAST,
    ),
    "replicated parameter not marked": Change(
        replaced(layers, "mark_sequence_parallel", lambda parameters: None),
        SEQUENCE_PARALLEL,
        "NVIDIA/Megatron-LM#619",
        "gradient of transformer.layers.1.mlp.dense_4h_to_h.bias",
    ),
    "wrong gradient of attention": Change(
        in_trainer(lambda trainer, patch: faults.patch_attention(trainer, patch, 1, WrongGradient.apply)),
        TENSOR_PARALLEL,
        "NVIDIA/Megatron-LM#1464",
        "gradient of transformer.layers.1.input_layernorm",
    ),
    "gradient of the tied matrix lost": verified("tied gradient not summed", "NVIDIA/Megatron-LM#1548"),
    "tied matrices drift apart": Change(
        changed(MixedPrecisionOptimizer, "step", untied), STAGES, "NVIDIA/Megatron-LM#656", gpt2.TIED_WEIGHT, (1,)
    ),
    "gradients divided after each micro-batch": Change(
        extra(BucketReducer, "add", lambda _, self, name, gradient: self._grad(name).div_(2), after=True),
        MICRO_BATCHES,
        "pytorch/torchtitan#1733",
        LAST,
    ),
    "pipeline's loss not divided by its tokens": Change(scaled(64.0), STAGES, "pytorch/torchtitan#2972", LAST),
    "weights depend on the tensor-parallel rank": Change(
        changed(gpt2, "seeded_normal", lambda original, seed, name, std: original(seed + 1, name, std)),
        TENSOR_PARALLEL,
        "pytorch/torchtitan#1750, NVIDIA/Megatron-LM#1736",
        "word_embeddings.weight",
        (1,),
    ),
    "weights depend on the pipeline stage": Change(
        changed(
            gpt2, "seeded_normal", lambda original, seed, name, std: original(seed, name.replace("s.1.", "s.0."), std)
        ),
        STAGES,
        "pytorch/torchtitan#3029",
        "transformer.layers.1.attention.query_key_value.weight",
        (1,),
    ),
    "hidden dropout equal on all ranks": Change(
        changed(
            transformer,
            "apply_hidden_dropout",
            lambda original, *args, first_position, **options: original(*args, **options),
        ),
        SEQUENCE_PARALLEL,
        "PaddlePaddle/PaddleFleetX#1005",
        "transformer.layers.0.post_attention_layernorm",
    ),
    "attention dropout equal on all ranks": verified("mask by local index", "awslabs/slapo#21"),
    "recomputed with other random numbers": Change(
        changed(
            TransformerBlock,
            "_run_layers",
            lambda original, self, numbers, packed, cache, seeds, x: original(
                self, numbers, packed, cache, [seed + is_recomputed() for seed in seeds], x
            ),
        ),
        RECOMPUTED,
        "allenai/OLMo-core#828",
        "gradient of transformer.layers.1.post_attention_layernorm",
    ),
    "recomputed from a wrong input": Change(
        changed(
            TransformerBlock,
            "_run_layers",
            lambda original, self, *args: original(self, *args[:-1], args[-1] * (1 + is_recomputed())),
        ),
        RECOMPUTED,
        "arXiv:2506.09280",
        "gradient of transformer.layers.1.post_attention_layernorm",
    ),
    "replicated gradients counted twice": verified("norm counted twice", "NVIDIA-NeMo/RL#3788"),
    "tied gradients counted twice": Change(
        changed(
            ParamAndGradBuffer,
            "__init__",
            lambda original, *args, **options: original(*args, **options | {"tied_param_is_duplicate": False}),
        ),
        STAGES,
        "NVIDIA/Megatron-LM#7228",
        "gradient norm",
    ),
    "norm of one pipeline stage": Change(without_collectives(grads), STAGES, "pytorch/torchtitan#649", "gradient norm"),
    "norm of one tensor-parallel rank": Change(
        without_collectives(grads), TENSOR_PARALLEL, "meta-pytorch/torchtune#2420", "gradient norm"
    ),
    "gradients of replicas not summed": Change(
        extra(BucketReducer, "__init__", lambda _, self, *args, **options: setattr(self, "_group", None), after=True),
        DATA_PARALLEL,
        "NVIDIA/Megatron-LM#1685",
        LAST,
    ),
    "mean of the ranks' means": Change(
        replaced(train_step, "tokens_in_global_batch", lambda trainer, batch: 2 * batch.mask.sum()),
        f"{DATA_PARALLEL} {EOD_MASK}",
        "huggingface/transformers#24725",
        "token_weight",
    ),
    "gradients added to stale memory": Change(
        extra(
            BucketReducer,
            "add",
            lambda _, self, name, gradient: self._grad(name).add_(self._buffer.view(self._buffer.params, name)),
            after=True,
        ),
        SHARDED,
        "NVIDIA/Megatron-LM#4609",
        LAST.replace("bias", "weight"),
    ),
    "samplers with different seeds": Change(
        changed(Splits, "training_samples", lambda original, self, seed, count: original(self, seed + 1, count)),
        DATA_PARALLEL,
        "NVlabs/LongLive#71",
        "tokens",
        (1,),
    ),
    "all ranks read the first shard": Change(
        changed(
            data,
            "BatchLoader",
            lambda original, *args, data_parallel_rank, **options: original(*args, data_parallel_rank=0, **options),
        ),
        DATA_PARALLEL,
        "vllm-project/speculators#427",
        "sample_ids",
        (1,),
    ),
    "a sample used twice": verified("lost micro-batch", "NVIDIA-NeMo/Megatron-Bridge#5944"),
    "schedule stepped once per rank": Change(
        extra(MixedPrecisionOptimizer, "_count_step", lambda self: self.num_updates.add_(1)),
        DATA_PARALLEL,
        "huggingface/accelerate#2926",
        "learning rate",
    ),
    "stale parameters after a step": verified("stale parameter after a gather", "NVIDIA/Megatron-LM#950"),
    "query, key and value in another order": verified("wrong QKV order", "awslabs/slapo#46"),
    "padding in the softmax": verified("padding in the softmax", "NVIDIA/Megatron-LM#1754"),
    "positions start at 0 on every rank": verified("position by local index", "NVIDIA/Megatron-LM#5243"),
    "head's gradient not summed": Change(
        replaced(cross_entropy, "enter_model_parallel_region", lambda x, *_: x),
        TENSOR_PARALLEL,
        "pytorch/torchtitan#3412",
        "gradient of transformer.final_layernorm",
    ),
    "a copy of the gradient summed": Change(
        replaced(
            layers, "dist", SimpleNamespace(all_reduce=lambda x, **options: dist.all_reduce(x.clone(), **options))
        ),
        TENSOR_PARALLEL,
        "NovaSky-AI/SkyRL#1886",
        "gradient of transformer.layers.1.post_attention_layernorm",
    ),
    "whole logits in the parallel loss": Change(
        changed(
            cross_entropy, "loss_from_stats", lambda original, stats: original(stats) + torch.log(torch.tensor(2.0))
        ),
        TENSOR_PARALLEL,
        "NVIDIA/Megatron-LM#7452",
        "loss",
    ),
    "gradient summed twice": verified("gradient summed twice", "pytorch/pytorch#160285"),
    "micro-batch's gradient overwritten": verified("lost gradient of a micro-batch", "karpathy/build-nanogpt#30"),
    "all-reduce leaves elements out": Change(
        changed(dist, "all_reduce", incomplete_all_reduce), DATA_PARALLEL, "NVIDIA/nccl#1950", "world group"
    ),
    "gradients read before they are summed": ordered("missed wait for gradients", "tensorflow/tensorflow#58022"),
    "gradient computed after its reduction": ordered("gradients overwritten", "NVIDIA/Megatron-LM#1012"),
    "barrier of one rank in a save": ordered("collective in a save", "alan-turing-institute/autocast#386"),
    "metric that one rank logs": ordered("collective in a branch", "Lightning-AI/pytorch-lightning#19106"),
    "buckets in another order": ordered("other order", "NVIDIA/apex#19"),
    "messages of another size": ordered("other shape", "NVIDIA/nccl#531"),
    "groups created in another order": ordered("groups in another order", "facebookresearch/param#183"),
    "both stages send first": ordered("opposing sends", "NVIDIA/Megatron-LM#5100"),
    "two groups in crossed order": ordered("two groups", "meta-pytorch/torchrec#4149"),
}


def waited(original: Any, self: BucketReducer, index: int) -> Any:
    work, part = original(self, index)
    work.wait()
    return work, part


def in_halves(original: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute a product as the sum of two products, which have half of the inputs each."""
    half = weight.size(1) // 2
    return original(x[..., :half], weight[:, :half], bias) + original(x[..., half:], weight[:, half:])


def in_float64(original: Any, *args: Any) -> Tensor:
    wide = (x.double() if isinstance(x, Tensor) else x for x in args)
    return original(*wide).to(args[0].dtype)  # type: ignore[no-any-return]


def reduce_scatter_by_all_reduce(x: Tensor, group: Any) -> tuple[Tensor, None]:
    return mappings._all_reduce(x, group).chunk(group.size())[group.rank()].contiguous(), None


def head_by_head(original: Any, qkv: Tensor, p: float, seeds: Tensor, location: int, first: int) -> Tensor:
    heads = range(qkv.size(2))
    return torch.cat([original(qkv[:, :, [n]], p, seeds, location, first + n) for n in heads], -1)


def counted(change: Callable[[list[Tensor]], list[Tensor]]) -> Plant:
    """Return a change that computes the gradient norm of `change(gradients)`."""

    def plant(trainer: Trainer, patch: Patch) -> None:
        patch.setattr(
            trainer.state.optimizer,
            "squared_norm",
            lambda split, replicated, *args, **options: mpu.all_reduced_squared_norm(
                change(list(split)), change(list(replicated)), *args, **options
            ),
        )

    return in_trainer(plant)


HARMLESS = {
    "small buckets": Change(replaced(train_state, "choose_bucket_size", lambda *_: 1000), SHARDED),
    "one bucket": Change(replaced(train_state, "choose_bucket_size", lambda *_: 10**9), DATA_PARALLEL),
    "gradients waited for at once": Change(changed(BucketReducer, "_send", waited), DATA_PARALLEL),
    "parameters waited for at once": Change(
        extra(ParamAllGather, "start_param_sync", lambda _, self: self.finish_param_sync(), after=True), SHARDED
    ),
    "messages waited for at once": Change(
        extra(mpu, "batched_p2p_ops", lambda moved, *_: [transfer.wait() for transfer in moved[1]], after=True), STAGES
    ),
    "copies are sent": Change(
        changed(
            mpu,
            "batched_p2p_ops",
            lambda original, sends, *others: original([(x.clone(), to) for x, to in sends], *others),
        ),
        STAGES,
    ),
    "other GELU": Change(replaced(kernels, "gelu_tanh", lambda x: F.gelu(x, approximate="tanh"))),
    "GELU in float64": Change(changed(kernels, "gelu_tanh", in_float64)),
    "layer norm in float64": Change(changed(F, "layer_norm", in_float64), SEQUENCE_PARALLEL),
    "products in float64": Change(changed(F, "linear", in_float64)),
    "products in halves": Change(changed(F, "linear", in_halves)),
    "weight gradients in float64": Change(changed(kernels, "weight_gradient", in_float64)),
    "all-reduce by gathering": Change(
        replaced(
            mappings, "_all_reduce", lambda x, group: mappings.all_gather_first_dim(x.unsqueeze(0), group)[0].sum(0)
        )
    ),
    "all-reduce in float64": Change(changed(mappings, "_all_reduce", in_float64)),
    "reduce-scatter by all-reduce": Change(
        replaced(mappings, "reduce_scatter_first_dim", reduce_scatter_by_all_reduce), SEQUENCE_PARALLEL
    ),
    "sum without overlap": Change(
        replaced(layers, "dist", SimpleNamespace(all_reduce=lambda x, group, async_op: dist.all_reduce(x, group=group)))
    ),
    "small chunks of logits": Change(replaced(cross_entropy, "chunk_size_for", lambda *_: 7)),
    "norm in another order": Change(counted(lambda gradients: gradients[::-1])),
    "norm in parts": Change(counted(lambda gradients: [part for x in gradients for part in x.split(100)]), STAGES),
    "losses in another order": Change(
        changed(train_step, "sum_losses", lambda original, losses: original(losses.flip(0))), ACCUMULATED
    ),
    "rows added from a copy": Change(
        changed(BucketReducer, "add_rows", lambda original, *args: original(*args[:-1], args[-1].clone())), ACCUMULATED
    ),
    "gradients added in float64": Change(
        changed(BucketReducer, "add", lambda original, self, name, x: original(self, name, x.double())), ACCUMULATED
    ),
    "copied seeds of dropout": Change(
        changed(mpu, "make_dropout_seeds", lambda original, *args: original(*args).clone()), RECOMPUTED
    ),
    "barrier in a step": Change(extra(MixedPrecisionOptimizer, "step", lambda self: dist.barrier()), SHARDED),
    "metric that all ranks log": Change(extra(IterationLogger, "log", lambda *_: dist.all_reduce(torch.zeros(2)))),
    "one more group": Change(extra(mpu, "initialize_model_parallel", lambda *_, **options: dist.new_group()), STAGES),
    "wrapped layer": Change(changed(transformer.ParallelMLP, "forward", lambda original, self, x: original(self, x))),
    "copied input of attention": Change(
        changed(kernels, "seeded_attention", lambda original, qkv, *args: original(qkv.clone(), *args))
    ),
    "attention head by head": Change(changed(kernels, "seeded_attention", head_by_head)),
    "token weights in float64": Change(
        changed(Batch, "split", lambda original, self, size, weight: original(self, size, weight.double().float())),
        MICRO_BATCHES,
    ),
}
