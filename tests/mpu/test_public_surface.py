"""Test the public names of `mpu`: the names of Megatron's first release, later names, and older names that still
work."""

from __future__ import annotations

import re
from pathlib import Path

import torch

import mpu

ROOT = Path(__file__).resolve().parents[2]
# the names in mpu/__init__.py of Megatron-LM 72c5f666b9 (2019)
OF_2019 = set(
    (
        "vocab_parallel_cross_entropy broadcast_data clip_grad_norm destroy_model_parallel get_data_parallel_group "
        "get_data_parallel_rank get_data_parallel_world_size get_model_parallel_group get_model_parallel_rank "
        "get_model_parallel_src_rank get_model_parallel_world_size initialize_model_parallel "
        "model_parallel_is_initialized ColumnParallelLinear ParallelEmbedding RowParallelLinear VocabParallelEmbedding "
        "copy_to_model_parallel_region gather_from_model_parallel_region reduce_from_model_parallel_region "
        "scatter_to_model_parallel_region checkpoint partition_activations_in_checkpoint get_cuda_rng_tracker "
        "model_parallel_cuda_manual_seed BertParallelSelfAttention BertParallelTransformerLayer "
        "BertParallelTransformerOutput GPT2ParallelTransformer LayerNorm"
    ).split()
)
ABSENT = {name for name in OF_2019 if name.startswith(("Bert", "GPT2"))}


def test_public_names_are_those_of_2019_and_of_the_page() -> None:
    """docs/reference/mpu.md lists the names that were added later, and the names of 2019 that do not exist."""
    page = (ROOT / "docs" / "reference" / "mpu.md").read_text(encoding="utf-8")
    listed = page.partition("## Names added after 2019")[2].partition("\nOlder names")[0]
    later = set(re.findall(r"`(\w+)(?:\(.*?\))?`", listed))
    assert later and not later & OF_2019
    assert set(mpu.__all__) == (OF_2019 - ABSENT) | later
    assert mpu.__all__ == sorted(set(mpu.__all__)) and all(hasattr(mpu, name) for name in mpu.__all__)
    assert "`GPT2Parallel…`, `BertParallel…`" in page


def test_packages_have_markers_for_type_checkers() -> None:
    """PEP 561 defines the file py.typed. Other packages share the folder `megatron`, so the file is one folder
    deeper."""
    assert all((ROOT / folder / "py.typed").exists() for folder in ("mpu", "data_utils", "megatron/gpt2"))


def test_names_until_version_0_3() -> None:
    old = (mpu.squared_norm, mpu.hidden_dropout, mpu.exchange, mpu.send_to_next_stage, mpu.receive_from_previous_stage)
    assert old == (
        mpu.all_reduced_squared_norm,
        mpu.apply_hidden_dropout,
        mpu.batched_p2p_ops,
        mpu.send_forward,
        mpu.recv_forward,
    )
    assert mpu.dropout is torch.nn.functional.dropout
