"""Which of torch's kernels of attention are allowed, and when."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import mpu
from megatron.gpt2.model.gpt2 import GPT2Model
from megatron.gpt2.text.scoring import score, windows_over
from tests.megatron.gpt2.text.test_generation import CONFIG


def test_inference_does_without_the_kernel_that_plans_each_length(monkeypatch: pytest.MonkeyPatch):
    """Also where training has chosen that one, which it finds again."""
    mpu.initialize_model_parallel(1)
    model, seen = GPT2Model(CONFIG).train(), []
    hidden_states = model.hidden_states
    monkeypatch.setattr(model, "hidden_states", lambda *args: (seen.append(
        (torch.backends.cuda.cudnn_sdp_enabled(), torch.backends.cuda.flash_sdp_enabled(), model.training)),
        hidden_states(*args))[1])
    torch.backends.cuda.enable_flash_sdp(False)
    try:
        score(model, windows_over(np.arange(20), 8, 8), batch_size=2)
        assert torch.backends.cuda.cudnn_sdp_enabled() and not torch.backends.cuda.flash_sdp_enabled()
    finally:
        torch.backends.cuda.enable_flash_sdp(True)
    assert set(seen) == {(False, True, False)} and model.training
