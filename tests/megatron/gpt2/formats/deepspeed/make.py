"""Write checkpoints with DeepSpeed's ZeRO on CPUs over gloo.

    PYTHONPATH=PROJECT:DEEPSPEED python make.py OUT CASE...

DEEPSPEED is a folder with an unpacked source distribution of deepspeed and its dependencies, CASE one of `CASES`. The
files here were written with 0.17.5 and torch 2.13. The model is this project's GPT-2, which has the parameter names of
Megatron in 2019, on the groups of this project's `mpu`. The engine, the optimizer and the writer are DeepSpeed's. AdamW
makes two steps on the same tokens on every rank, so that the state of all cases is equal but for rounding.
`expected.npz` has the tensors that DeepSpeed held in memory in the case of fp32.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

import mpu
from megatron.gpt2.config import ModelConfig
from megatron.gpt2.model.gpt2 import GPT2Model

SHAPE = ModelConfig(
    num_layers=2, hidden_size=8, num_attention_heads=4, max_position_embeddings=12, vocab_size=29,
    make_vocab_size_divisible_by=8, attention_dropout=0.0, hidden_dropout=0.0,
)  # fmt: skip
# (tensor-, data-parallel size, ZeRO's stage, precision, more settings of ZeRO)
CASES: dict[str, tuple[int, int, int, str, dict[str, Any]]] = {
    "zero1_fp32_dp3": (1, 3, 1, "fp32", {}),
    "zero1_bf16_tp2": (2, 1, 1, "bf16", {}),
    "zero2_fp16_tp2_dp2": (2, 2, 2, "fp16", {}),
    "zero2_fp16_round_robin_dp2": (1, 2, 2, "fp16", {"round_robin_gradients": True}),
}


def write(rank: int, world_size: int, case: str, out: Path, rendezvous: str) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size)
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    tp, _, stage, precision, more = CASES[case]
    mpu.initialize_model_parallel(tp)
    torch.manual_seed(1)
    model: Any = GPT2Model(SHAPE)
    groups = [
        {"params": [x for x in model.parameters() if (x.dim() > 1) == decays], "weight_decay": decay}
        for decays, decay in ((True, 0.1), (False, 0.0))
    ]
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, **more},
    }
    if precision == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 1}
    elif precision == "bf16":
        config["bf16"] = {"enabled": True}
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95)),
        config=config,
        mpu=mpu,
        dist_init_required=False,
    )
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        tokens = torch.randint(SHAPE.vocab_size, (2, 13), generator=generator)
        loss = mpu.vocab_parallel_cross_entropy(engine(tokens[:, :-1]).float(), tokens[:, 1:].t()).mean()
        engine.backward(loss)
        engine.step()
    args = argparse.Namespace(
        num_layers=2, hidden_size=8, num_attention_heads=4, max_position_embeddings=12, model_parallel_size=tp,
        padded_vocab_size=32, make_vocab_size_divisible_by=32 // tp,
    )  # fmt: skip
    engine.save_checkpoint(
        str(out / case), tag="global_step2", client_state={"iteration": 2, "checkpoint_version": 3.0, "args": args}
    )
    if precision == "fp32":
        engine.optimizer._hp_optimizer_states_linked = False  # it links the second group before that has a state
        engine.optimizer._lazy_init_hp_params_optimizer_state()
        held = {f"master.{name}": safe_get_full_fp32_param(x) for name, x in engine.module.named_parameters()}
        for kind in ("exp_avg", "exp_avg_sq"):
            for name, x in engine.module.named_parameters():
                held[f"{kind}.{name}"] = safe_get_full_optimizer_state(x, kind)
        if rank == 0:
            np.savez_compressed(out / "expected.npz", **{name: x.detach().numpy() for name, x in held.items()})
    dist.barrier()


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(exist_ok=True)
    torch.set_num_threads(1)
    from deepspeed.accelerator import get_accelerator  # before the fork, because this import takes long

    get_accelerator().is_fp16_supported = lambda: True
    for name in sys.argv[2:]:
        with tempfile.TemporaryDirectory() as temporary:
            size = CASES[name][0] * CASES[name][1]
            start_processes(write, (size, name, folder, f"{temporary}/rendezvous"), size, start_method="fork")
