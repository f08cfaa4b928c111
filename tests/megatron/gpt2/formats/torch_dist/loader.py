"""Read a checkpoint with megatron-core's loader, on a CPU over gloo. PYTHONPATH has this project and megatron-core.

    python loader.py rewrite FOLDER OUT CASE...
    python loader.py logits FOLDER OUT.npz

`rewrite` loads the iteration in FOLDER, with Adam's state and the schedule, in the layout of the case, and saves it
again in the form of the case. `logits` computes the logits of an iteration without model parallelism, in fp32. CUDA
calls of megatron-core run on the CPU (`OnCPU`), with torch's AdamW instead of Apex's; model, optimizer, sharded state,
loader and writer are megatron-core's.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import start_processes
from torch.overrides import TorchFunctionMode

# Each case is (tensor-, pipeline-, data-parallel size, optimizer form).
CASES = {
    "dp_reshardable_dp2": (1, 1, 2, "dp_reshardable"),
    "dp_reshardable_tp2_pp2_16": (2, 2, 1, "dp_reshardable"),
    "fully_reshardable_tp4": (4, 1, 1, "fully_reshardable"),
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


def build(args: Any, tp: int, pp: int, dtype: torch.dtype) -> tuple[Any, Any]:
    """Build megatron-core's model of the saved `args` on this rank. Return the model and its config."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.initialize_model_parallel(tp, pp)
    # Dropout is 0, because it would use a GPU's generator.
    tensor_parallel.get_cuda_rng_tracker = lambda: types.SimpleNamespace(fork=lambda *_: contextlib.nullcontext())
    config = TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
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
        args.padded_vocab_size,
        args.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=True,
    )
    return model.to(dtype), config


def rewrite(rank: int, world_size: int, source: Path, folder: Path, case: str, rendezvous: str) -> None:
    """Load the iteration in `source` as Megatron's training program does, and save it into `folder`."""
    tp, pp, _, form = CASES[case]
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size)
    from megatron.core import dist_checkpointing
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    with OnCPU():
        common = dist_checkpointing.load_common_state_dict(str(source))
        vars(common["args"]).update(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp)
        model, config = build(common["args"], tp, pp, torch.bfloat16)
        whole = DistributedDataParallel(
            config, DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True), model
        )
        optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=0.01,
                min_lr=0.001,
                weight_decay=0.1,
                adam_beta2=0.95,
                clip_grad=0.0,
                bf16=True,
                params_dtype=torch.bfloat16,
                use_distributed_optimizer=True,
            ),
            [whole],
        )
        schedule = OptimizerParamScheduler(optimizer, 0.0, 0.01, 0.001, 40, 400, "cosine", 0.1, 0.1, 400, "constant")
        # torch's AdamW replaces Apex's. It has no state before its first step, and keeps `step` in the state, which
        # this form lacks.
        inner = optimizer.chained_optimizers[0]
        inner._init_optimizer_states_with_dummy_values()
        held, put = inner._get_main_param_and_optimizer_states, inner._set_main_param_and_optimizer_states
        inner._set_main_param_and_optimizer_states = lambda parameter, tensors: put(
            parameter, {"step": held(parameter)["step"], **tensors}
        )
        metadata = dist_checkpointing.load_content_metadata(str(source))
        weights = model.sharded_state_dict(metadata=metadata)
        state = dist_checkpointing.load(
            {"model": weights, "optimizer": optimizer.sharded_state_dict(weights, is_loading=True, metadata=metadata)},
            str(source),
        )
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        schedule.load_state_dict(state["opt_param_scheduler"])

        metadata = {
            "singleton_local_shards": False,
            "chained_optim_avoid_prefix": True,
            "distrib_optim_sharding_type": form,
        }
        weights = model.sharded_state_dict(metadata=metadata)
        saved = {
            "args": common["args"],
            "checkpoint_version": 3.0,
            "iteration": common["iteration"],
            "model": weights,
            "optimizer": optimizer.sharded_state_dict(weights, metadata=metadata),
            "opt_param_scheduler": schedule.state_dict(),
        }
        if rank == 0:
            folder.mkdir(parents=True)
        dist.barrier()
        dist_checkpointing.save(saved, str(folder), content_metadata=metadata)
    dist.barrier()
    dist.destroy_process_group()


def logits(rank: int, world_size: int, source: Path, out: Path, rendezvous: str) -> None:
    """Write logits [b, s, padded vocabulary] of tokens [b, s]."""
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size)
    from megatron.core import dist_checkpointing

    with OnCPU(), torch.no_grad():
        args = dist_checkpointing.load_common_state_dict(str(source))["args"]
        model, _ = build(args, 1, 1, torch.float32)
        model.load_state_dict(dist_checkpointing.load({"model": model.sharded_state_dict()}, str(source))["model"])
        model.eval()
        positions = args.max_position_embeddings
        tokens = torch.randint(29, (2, positions), generator=torch.Generator().manual_seed(0))
        causal = torch.ones(positions, positions).triu(1).bool()[None, None]
        found = model(tokens, torch.arange(positions).expand(2, -1), causal)
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
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        start_processes(function, (world_size, *args, f"{folder}/rendezvous"), world_size, start_method="fork")


if __name__ == "__main__":
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    program, source, out, *cases = sys.argv[1:]
    if program == "logits":
        ranks(logits, 1, Path(source), Path(out))
    for case in cases:
        tp, pp, dp, _ = CASES[case]
        ranks(rewrite, tp * pp * dp, Path(source), Path(out, case, Path(source).name), case)
