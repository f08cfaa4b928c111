"""Test the process groups, and the collectives with their gradients."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import mpu
from tests.distributed import run_ranks


def groups(rank: int, world_size: int) -> list[tuple[int, ...]]:
    with pytest.raises(ValueError, match="world size 4 is not divisible by the tensor-parallel size 3"):
        mpu.initialize_model_parallel(3)
    found = []
    for size in (1, 2, 4):
        state = mpu.initialize_model_parallel(size)
        assert (state.rank, state.world_size) == (rank, world_size)
        assert (mpu.get_model_parallel_world_size(), mpu.get_data_parallel_world_size()) == (size, 4 // size)
        model, data = map(dist.get_process_group_ranks, (state.model_parallel_group, state.data_parallel_group))
        assert mpu.get_model_parallel_src_rank() == model[0]
        found += [tuple(model), tuple(data), (mpu.get_model_parallel_rank(), mpu.get_data_parallel_rank())]
        mpu.destroy_model_parallel()
        assert not mpu.model_parallel_is_initialized()
    return found


def test_neighbours_share_layers():
    by_rank = run_ranks(groups, 4)
    assert by_rank[1] == [(1,), (0, 1, 2, 3), (0, 1), (0, 1), (1, 3), (1, 0), (0, 1, 2, 3), (1,), (1, 0)]
    assert by_rank[2][3:6] == [(2, 3), (0, 2), (0, 1)]


def check_mappings(rank: int, world_size: int) -> None:
    mine = torch.arange(6.0).view(2, 3) + 10 * rank
    everyone = [torch.arange(6.0).view(2, 3) + 10 * r for r in range(world_size)]
    whole = torch.arange(2.0 * 4 * world_size).view(2, -1)
    scale = rank + 1.0  # The gradients of the ranks differ by this factor.
    for operation, x, expected, gradient in (
        (mpu.copy_to_model_parallel_region, mine, mine, sum(r + 1.0 for r in range(world_size))),
        (mpu.reduce_from_model_parallel_region, mine, torch.stack(everyone).sum(0), scale),
        (mpu.gather_from_model_parallel_region, mine, torch.cat(everyone, -1), scale),
        (
            mpu.scatter_to_model_parallel_region,
            whole,
            whole[:, 4 * rank : 4 * (rank + 1)],
            torch.arange(1.0, world_size + 1).repeat_interleave(4),
        ),
    ):
        given = x.clone().requires_grad_()
        y = operation(given)
        y.backward(scale * torch.ones_like(y))
        assert torch.equal(given.detach(), x), "the caller's tensor was written to"
        assert torch.equal(y.detach(), expected) and given.grad is not None, operation
        assert torch.equal(given.grad, torch.ones_like(x) * gradient), operation
    if world_size > 1:
        with pytest.raises(ValueError, match="not divisible"):
            mpu.scatter_to_model_parallel_region(torch.zeros(2, 4 * world_size + 1))


def check_broadcast(rank: int, world_size: int) -> None:
    data = {"text": torch.arange(12).view(3, 4), "ids": torch.tensor([7, 8])} if rank == 0 else None
    got = mpu.broadcast_data(["text", "ids"], data, torch.int64)
    assert torch.equal(got["text"], torch.arange(12).view(3, 4)) and torch.equal(got["ids"], torch.tensor([7, 8]))
    # If the first rank cannot send its data, every rank raises an error and none waits.
    for key, dtype in (("text", torch.int32), ("none", torch.int64)):
        with pytest.raises(ValueError, match=f"the first rank has no tensor '{key}' of {dtype}"):
            mpu.broadcast_data([key], data, dtype)


def check_clip(rank: int, world_size: int) -> None:
    """Check that the norm counts a split parameter on every rank and a replicated parameter once."""
    split, replicated = (torch.nn.Parameter(torch.zeros(4)) for _ in range(2))
    split.model_parallel = True  # type: ignore[attr-defined]
    for norm_type, expected in ((2, (4 * world_size * 9 + 4 * 16) ** 0.5), (torch.inf, 4.0)):
        split.grad, replicated.grad = torch.full((4,), 3.0), torch.full((4,), 4.0)
        norm = mpu.clip_grad_norm([split, replicated], 1.0, norm_type)
        assert norm == pytest.approx(expected, rel=1e-6)
        assert split.grad[0].item() == pytest.approx(3 / expected, rel=1e-4)
        assert mpu.clip_grad_norm([split, replicated], 10.0, norm_type) == pytest.approx(1.0, rel=1e-4)
        assert split.grad[0].item() == pytest.approx(3 / expected, rel=1e-4), "a small norm must not be scaled up"
    with pytest.raises(ValueError, match="2 and inf"):
        mpu.clip_grad_norm([split], 1.0, 1)


def check_pipeline(rank: int, world_size: int) -> None:
    """Check that the first rank receives from the last rank only with ring=True."""
    mpu.initialize_model_parallel(1, world_size)
    x = torch.full((2,), float(rank))
    assert torch.equal(mpu.recv_forward(torch.full((2,), -1.0)), x - 1)
    mpu.send_forward(x)
    if rank == 0:
        mpu.send_forward(x, ring=True)
    received = mpu.recv_forward(torch.zeros(2), ring=True)
    assert torch.equal(received, (x - 1) % world_size)
    if rank > 0:
        mpu.send_forward(x, ring=True)


def check_all(rank: int, world_size: int) -> None:
    mpu.initialize_model_parallel(world_size)
    for check in (check_mappings, check_broadcast, check_clip, check_pipeline):
        check(rank, world_size)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_collectives(world_size: int):
    run_ranks(check_all, world_size)
