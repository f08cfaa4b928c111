"""NCCL on one GPU: a group of one rank, in which a small run calls every collective with CUDA tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.megatron.gpt2.train.alone_in_a_group import RUNS, check
from tests.megatron.gpt2.train.training_runs import write_text

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.mark.parametrize("name", RUNS)
def test_a_run_in_a_group_of_one(tmp_path: Path, name: str):
    write_text(tmp_path)
    check(name, "nccl", torch.device("cuda", 0), str(tmp_path))
