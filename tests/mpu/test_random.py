from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import mpu
from mpu.random import MODEL_PARALLEL_RNG
from tests.distributed import run_ranks


def draws(rank: int, world_size: int, model_parallel_size: int) -> tuple[list[float], list[float]]:
    """What this rank draws from the default generator and from the tracker."""
    mpu.initialize_model_parallel(model_parallel_size)
    mpu.model_parallel_cuda_manual_seed(1234)
    shared = torch.rand(4).tolist()
    with mpu.get_cuda_rng_tracker().fork():
        own = torch.rand(4).tolist()
    return shared, own


def test_what_ranks_share():
    # ranks 0, 1 share layers; 0, 2 share data
    results = run_ranks(draws, 4, 2)
    (d0, t0), (d1, t1), (d2, t2), (d3, t3) = results
    assert d0 == d1 and d2 == d3, "hidden dropout is the same inside a model-parallel group"
    assert t0 != t1 and t2 != t3, "the tracker differs inside a model-parallel group"
    assert (d0, t0, t1) == (d2, t2, t3), "the same seed is the same numbers on data-parallel ranks, as in 2019"


def test_seeds_are_megatrons_at_rank_0():
    mpu.initialize_model_parallel(1)
    mpu.model_parallel_cuda_manual_seed(1234)
    assert torch.initial_seed() == 1234
    with mpu.get_cuda_rng_tracker().fork():
        own = torch.rand(3)
    assert torch.equal(own, torch.rand(3, generator=torch.Generator().manual_seed(1234 + 2718)))


def test_a_model_on_the_cpu_draws_there_also_where_the_process_has_used_a_gpu(monkeypatch: pytest.MonkeyPatch):
    mpu.initialize_model_parallel(1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: pytest.fail("the GPU's generator was asked"))
    mpu.model_parallel_cuda_manual_seed(1, "cpu")
    with mpu.get_cuda_rng_tracker().fork():
        first = torch.rand(3)
    with mpu.get_cuda_rng_tracker().fork():
        assert not torch.equal(first, torch.rand(3))
    monkeypatch.undo()
    mpu.model_parallel_cuda_manual_seed(1)


def test_fork_continues_its_stream_and_leaves_the_default_alone():
    tracker = mpu.get_cuda_rng_tracker()
    tracker.reset()
    tracker.add("a", 1)
    tracker.add("b", 2)
    with pytest.raises(ValueError, match="'a' exists"):
        tracker.add("a", 3)
    with pytest.raises(KeyError, match="'c'"), tracker.fork("c"):
        pass
    torch.manual_seed(5)
    expected = torch.rand(4, generator=torch.Generator().manual_seed(5))
    stream = torch.rand(4, generator=torch.Generator().manual_seed(1))
    saved = tracker.get_states()
    got, default = [], []
    for _ in range(2):
        with tracker.fork("a"):
            got.append(torch.rand(2))
        default.append(torch.rand(2))
        with pytest.raises(ZeroDivisionError), tracker.fork("b"):
            raise ZeroDivisionError
    assert torch.equal(torch.cat(got), stream) and torch.equal(torch.cat(default), expected)
    tracker.set_states(saved)
    with tracker.fork("a"):
        assert torch.equal(torch.rand(2), stream[:2])


def test_checkpoint_repeats_both_streams():
    mpu.initialize_model_parallel(1)
    weight = torch.randn(16, 16)

    def block(x: torch.Tensor) -> torch.Tensor:
        x = F.dropout(F.gelu(x @ weight), 0.5)
        with mpu.get_cuda_rng_tracker().fork():
            x = F.dropout(x, 0.5)
        return F.gelu(x) * 2

    def run(wrap) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        mpu.model_parallel_cuda_manual_seed(3)
        x = torch.linspace(-1, 1, 8 * 16).view(8, 16).requires_grad_()
        y = wrap(wrap(x))
        y.sum().backward()
        after = mpu.get_cuda_rng_tracker().get_states()[MODEL_PARALLEL_RNG]
        return y.detach(), x.grad, torch.get_rng_state(), after

    plain, again = run(block), run(lambda x: mpu.checkpoint(block, x))
    for a, b in zip(plain, again, strict=True):
        assert torch.equal(a, b)
