"""Write checkpoints with megatron-core on a CPU over gloo, or read one with its loader.

    PYTHONPATH=PROJECT:CORE python make.py write OUT CASE...
    PYTHONPATH=PROJECT:CORE python make.py rewrite FOLDER OUT CASE...
    PYTHONPATH=PROJECT:CORE python make.py logits FOLDER OUT.npz

`rewrite` loads the iteration in FOLDER, with Adam's state and the schedule, in the layout of the case, and saves it
again in the form of the case.

CORE is a folder with an unpacked wheel of megatron-core, CASE one of `CASES`. The names of the files here have the
version, from 0.15.0 to 0.19.0, and torch was 2.13. Since 0.19, megatron-core also needs triton. Every case holds the
same model of two layers: weights and gradients depend on the parameter's name and the global index, not on the layout,
and Adam makes one step. CUDA calls of megatron-core run on the CPU (`OnCPU`), with torch's AdamW instead of Apex's;
model, optimizer, sharded state and writer are megatron-core's.

`expected.npz` has the tensors of the single rank of `plain` under megatron-core's names, `logits.npz` tokens and the
fp32 logits of megatron-core's loader and model for `plain`. With a distributed optimizer and two small stages,
megatron-core warns that tensors "will be padded with zeros which can lead to data corruption", and writes wrong
moments of the word embeddings; with 16 positions (`..._16`) the padding is right.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import types
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import start_processes
from torch.overrides import TorchFunctionMode

LAYERS, HIDDEN, HEADS, POSITIONS, VOCABULARY, PADDED, ITERATION = 2, 8, 4, 12, 29, 32, 3
# With two stages, megatron-core writes flat buckets only if the bucket before the word embeddings ends at
# a multiple of 64 values.
MORE_POSITIONS = 16
# (tensor-, pipeline-, data-parallel size, optimizer form, dtype, metadata of the layers' names)
CASES: dict[str, tuple[int, int, int, str, torch.dtype, bool]] = {
    "plain": (1, 1, 1, "plain", torch.bfloat16, False),
    "plain_fp32_tp2_pp2": (2, 2, 1, "plain", torch.float32, False),
    "fully_reshardable_tp4": (4, 1, 1, "fully_reshardable", torch.bfloat16, False),
    "plain_tp2_pp2_per_layer": (2, 2, 1, "plain", torch.bfloat16, True),
    "fully_reshardable_dp2": (1, 1, 2, "fully_reshardable", torch.bfloat16, False),
    "fully_sharded_model_space_tp2_dp2": (2, 1, 2, "fully_sharded_model_space", torch.bfloat16, False),
    "dp_reshardable_dp2": (1, 1, 2, "dp_reshardable", torch.bfloat16, False),
    "dp_reshardable_tp2_pp2_16": (2, 2, 1, "dp_reshardable", torch.bfloat16, False),
    "dp_reshardable_fp32_tp2_dp2": (2, 1, 2, "dp_reshardable", torch.float32, False),
    "weights": (1, 2, 1, "none", torch.bfloat16, False),
}


class OnCPU(TorchFunctionMode):
    """Redirects GPU allocations to the CPU, and lets a CPU tensor report that it is on a GPU."""

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if func is Tensor.cuda:
            return args[0]
        result = func(*args, **kwargs)
        return result.replace("torch.", "torch.cuda.") if func is Tensor.type and isinstance(result, str) else result


def drawn(name: str, kind: str, shape: tuple[int, ...]) -> Tensor:
    """The global tensor [shape]: normal with deviation 0.2, layer norm weights around 1. The values are exact in bf16,
    so that models of both dtypes have the same masters."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{kind} {name}".encode()))
    values = 0.2 * torch.randn(shape, generator=generator) + (kind == "weight" and "norm" in name and "weight" in name)
    return values.bfloat16().float()


def named(model: Any) -> Iterator[tuple[str, Any]]:
    """The parameters under names that do not depend on the stage: global layer numbers, and one name for the tied
    matrix."""
    first = model.decoder.layers[0].layer_number - 1
    for name, parameter in model.named_parameters():
        words = name.replace("output_layer", "embedding.word_embeddings").split(".")
        if words[1] == "layers":
            words[2] = str(int(words[2]) + first)
        yield ".".join(words), parameter


def fill(model: Any, tp: int, tp_rank: int, kind: str) -> None:
    """Set all weights or all gradients."""
    for name, parameter in named(model):
        shape, dim = list(parameter.shape), getattr(parameter, "partition_dim", -1)
        split = getattr(parameter, "tensor_model_parallel", False) and tp > 1
        if split:
            shape[dim] *= tp
        whole = drawn(name, kind, tuple(shape))
        part = whole.chunk(tp, dim)[tp_rank] if split else whole
        (parameter.data if kind == "weight" else parameter.main_grad).copy_(part)


def build(tp: int, pp: int, dtype: torch.dtype, positions: int = POSITIONS) -> tuple[Any, Any]:
    """Build megatron-core's model on this rank. Returns it and its config."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.initialize_model_parallel(tp, pp)
    # Dropout is 0, because it would use a GPU's generator.
    tensor_parallel.get_cuda_rng_tracker = lambda: types.SimpleNamespace(fork=lambda *_: contextlib.nullcontext())
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        use_cpu_initialization=True,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        PADDED,
        positions,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=True,
    )
    return model.to(dtype), config


def arguments(tp: int, pp: int, dp: int, dtype: torch.dtype, positions: int) -> argparse.Namespace:
    """The arguments of Megatron's training program that describe the model or the run."""
    from megatron.core.enums import ModelType
    from megatron.core.transformer.enums import AttnBackend

    return argparse.Namespace(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        ffn_hidden_size=4 * HIDDEN,
        num_attention_heads=HEADS,
        max_position_embeddings=positions,
        seq_length=positions,
        padded_vocab_size=PADDED,
        vocab_size=None,
        make_vocab_size_divisible_by=8,
        norm_epsilon=1e-5,
        normalization="LayerNorm",
        attention_dropout=0.0,
        hidden_dropout=0.0,
        init_method_std=0.02,
        openai_gelu=False,
        bias_gelu_fusion=False,
        swiglu=False,
        add_bias_linear=True,
        untie_embeddings_and_output_weights=False,
        position_embedding_type="learned_absolute",
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=None,
        data_parallel_size=dp,
        world_size=tp * pp * dp,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=False,
        global_batch_size=4,
        micro_batch_size=2,
        train_iters=100,
        consumed_train_samples=4 * ITERATION,
        clip_grad=1.0,
        iteration=0,
        model_type=ModelType.encoder_or_decoder,
        attention_backend=AttnBackend.auto,
        ckpt_format="torch_dist",
        transformer_impl="local",
        use_distributed_optimizer=True,
        num_experts=None,
        multi_latent_attention=False,
        qk_layernorm=False,
        apply_layernorm_1p=False,
    )


def write(rank: int, world_size: int, case: str, out: Path, source: Path | None, rendezvous: str) -> None:
    """Write the iteration of a case from this rank, after one step or after loading the iteration in `source`. If rank
    0 has all tensors, it also writes the expected values."""
    tp, pp, dp, form, dtype, per_layer = CASES[case]
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size)
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedObject
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    with OnCPU():
        positions = MORE_POSITIONS if case.endswith(f"_{MORE_POSITIONS}") else POSITIONS
        if source is not None:
            positions = dist_checkpointing.load_common_state_dict(str(source))["args"].max_position_embeddings
        model, config = build(tp, pp, dtype, positions)
        tp_rank, pp_rank = (
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_pipeline_model_parallel_rank(),
        )
        fill(model, tp, tp_rank, "weight")
        sharded = form not in ("plain", "none")
        whole = DistributedDataParallel(
            config, DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=sharded), model
        )
        optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=0.01,
                min_lr=0.001,
                weight_decay=0.1,
                adam_beta2=0.95,
                clip_grad=0.0,
                bf16=dtype == torch.bfloat16,
                params_dtype=dtype,
                use_distributed_optimizer=sharded,
            ),
            [whole],
        )
        schedule = OptimizerParamScheduler(optimizer, 0.0, 0.01, 0.001, 40, 400, "cosine", 0.1, 0.1, 400, "constant")
        if source is None:
            fill(model, tp, tp_rank, "gradient")
            optimizer.step()
            schedule.step(4 * ITERATION)
        else:
            load(source, model, optimizer, schedule)
        metadata: dict[str, Any] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
        if per_layer:
            metadata["non_homogeneous_layers"] = True
        if sharded:
            metadata["distrib_optim_sharding_type"] = form
        state: dict[str, Any] = {
            "args": arguments(tp, pp, dp, dtype, positions),
            "checkpoint_version": 3.0,
            "iteration": ITERATION,
            "num_floating_point_operations_so_far": 0,
            "model": model.sharded_state_dict(metadata=metadata),
        }
        if form != "none":
            state["optimizer"] = optimizer.sharded_state_dict(state["model"], metadata=metadata)
            state["opt_param_scheduler"] = schedule.state_dict()
        rng = [
            {
                "random_rng_state": (3, (1, 2), None),
                "np_rng_state": np.random.get_state(),
                "torch_rng_state": torch.get_rng_state()[:8].clone(),
                "rng_tracker_states": {},
            }
        ]
        state["rng_state"] = ShardedObject(
            "rng_state", rng, (pp, tp), (pp_rank, tp_rank), replica_id=parallel_state.get_data_parallel_rank()
        )
        folder = out / case / f"iter_{ITERATION:07d}"
        if rank == 0:
            folder.mkdir(parents=True)
            (out / case / "latest_checkpointed_iteration.txt").write_text(str(ITERATION))
        dist.barrier()
        dist_checkpointing.save(state, str(folder), content_metadata=metadata)
        if source is None and case.startswith("plain") and tp == pp == 1:
            held = {f"model.{name}": parameter.detach() for name, parameter in named(model)}
            inner = optimizer.chained_optimizers[0] if hasattr(optimizer, "chained_optimizers") else optimizer
            for name, parameter in named(model):
                master = parameter.main_param
                held |= {f"{kind}.{name}": inner.optimizer.state[master][kind] for kind in ("exp_avg", "exp_avg_sq")}
                held[f"master.{name}"] = master.detach()
            np.savez_compressed(out / "expected.npz", **{name: x.float().numpy() for name, x in held.items()})
    dist.barrier()
    dist.destroy_process_group()


def load(folder: Path, model: Any, optimizer: Any, schedule: Any) -> None:
    """Load the iteration in `folder` with megatron-core's loader, as Megatron's training program does."""
    from megatron.core import dist_checkpointing

    metadata = dist_checkpointing.load_content_metadata(str(folder))
    # torch's AdamW replaces Apex's. It has no state before its first step, and keeps `step` in the
    # state, which this form lacks.
    inner = optimizer.chained_optimizers[0]
    inner._init_optimizer_states_with_dummy_values()
    held, put = inner._get_main_param_and_optimizer_states, inner._set_main_param_and_optimizer_states
    inner._set_main_param_and_optimizer_states = lambda parameter, tensors: put(
        parameter, {"step": held(parameter)["step"], **tensors}
    )
    weights = model.sharded_state_dict(metadata=metadata)
    state = dist_checkpointing.load(
        {"model": weights, "optimizer": optimizer.sharded_state_dict(weights, is_loading=True, metadata=metadata)},
        str(folder),
    )
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    schedule.load_state_dict(state["opt_param_scheduler"])


def logits(rank: int, world_size: int, folder: Path, out: Path, rendezvous: str) -> None:
    """Compute logits [b, s, padded vocabulary] of tokens [b, s] with megatron-core's loader and model in fp32, from the
    iteration in `folder`."""
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size)
    from megatron.core import dist_checkpointing

    with OnCPU(), torch.no_grad():
        model, _ = build(1, 1, torch.float32)
        state = dist_checkpointing.load({"model": model.sharded_state_dict()}, str(folder))
        model.load_state_dict(state["model"])
        model.eval()
        tokens = torch.randint(VOCABULARY, (2, POSITIONS), generator=torch.Generator().manual_seed(0))
        causal = torch.ones(POSITIONS, POSITIONS).triu(1).bool()[None, None]
        found = model(tokens, torch.arange(POSITIONS).expand(2, -1), causal)
        np.savez_compressed(out, tokens=tokens.numpy(), logits=found.numpy())
    dist.destroy_process_group()


def ranks(function: Any, world_size: int, *args: Any) -> None:
    """Run `function` on `world_size` forked ranks. megatron-core is imported once, before the fork."""
    import megatron.core.dist_checkpointing
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.models.gpt.gpt_model
    import megatron.core.optimizer  # noqa: F401

    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
    np.product = np.prod  # type: ignore[attr-defined]  # which 0.15 asks for and numpy 2 lacks
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        start_processes(function, (world_size, *args, f"{folder}/rendezvous"), world_size, start_method="fork")


def main(argv: list[str]) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    if argv[0] == "logits":
        ranks(logits, 1, Path(argv[1]), Path(argv[2]))
        return
    source = Path(argv.pop(1)) if argv[0] == "rewrite" else None
    out = Path(argv[1])
    out.mkdir(exist_ok=True)
    for case in argv[2:]:
        tp, pp, dp, *_ = CASES[case]
        ranks(write, tp * pp * dp, case, out, source)


if __name__ == "__main__":
    main(sys.argv[1:])
