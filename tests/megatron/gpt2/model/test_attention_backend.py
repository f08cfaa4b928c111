"""Which of torch's kernels of attention are allowed, and when."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import mpu
from megatron.gpt2.generate.scoring import score, windows_over
from megatron.gpt2.model.gpt2 import GPT2Model
from tests.megatron.gpt2.generate.test_generation import CONFIG


def test_inference_does_without_the_kernel_that_plans_each_length(monkeypatch: pytest.MonkeyPatch):
    """Also where training has chosen that one, which it finds again."""
    mpu.initialize_model_parallel(1)
    model = GPT2Model(CONFIG).train()
    seen: set[tuple[bool, bool, bool]] = set()

    def hidden_states(*args: Any) -> Tensor:
        seen.add((torch.backends.cuda.cudnn_sdp_enabled(), torch.backends.cuda.flash_sdp_enabled(), model.training))
        return GPT2Model.hidden_states(model, *args)

    monkeypatch.setattr(model, "hidden_states", hidden_states)
    torch.backends.cuda.enable_cudnn_sdp(True)  # whatever an earlier test's run has chosen
    torch.backends.cuda.enable_flash_sdp(False)
    try:
        score(model, windows_over(np.arange(20), 8, 8), batch_size=2)
        assert torch.backends.cuda.cudnn_sdp_enabled() and not torch.backends.cuda.flash_sdp_enabled()
    finally:
        torch.backends.cuda.enable_flash_sdp(True)
    assert seen == {(False, True, False)} and model.training
