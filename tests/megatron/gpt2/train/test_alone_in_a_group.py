"""The check that a GPU runs over NCCL (tests/gpu/test_cuda.py) runs over gloo as well."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.megatron.gpt2.train.alone_in_a_group import check
from tests.megatron.gpt2.train.training_runs import write_text


def test_one_rank_calls_every_collective_and_computes_the_same(tmp_path: Path):
    write_text(tmp_path)
    check("sequence parallel, sharded", "gloo", torch.device("cpu"), str(tmp_path))
