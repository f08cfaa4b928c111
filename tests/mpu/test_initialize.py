from __future__ import annotations

import pytest

import mpu
from tests.distributed import run_ranks


def groups(rank: int, world_size: int) -> list[tuple[int, ...]]:
    import torch.distributed as dist

    with pytest.raises(ValueError, match="4 ranks is not divisible by the model-parallel size 3"):
        mpu.initialize_model_parallel(3)
    assert not mpu.model_parallel_is_initialized()
    found = []
    for size in (1, 2, 4):
        state = mpu.initialize_model_parallel(size)
        assert mpu.model_parallel_is_initialized()
        assert (state.rank, state.world_size) == (rank, world_size)
        assert mpu.get_model_parallel_world_size() * mpu.get_data_parallel_world_size() == world_size
        assert mpu.get_model_parallel_group().size() == size
        assert mpu.get_model_parallel_src_rank() == dist.get_process_group_ranks(mpu.get_model_parallel_group())[0]
        found += [
            tuple(dist.get_process_group_ranks(mpu.get_model_parallel_group())),
            tuple(dist.get_process_group_ranks(mpu.get_data_parallel_group())),
            (mpu.get_model_parallel_rank(), mpu.get_data_parallel_rank()),
        ]
        mpu.destroy_model_parallel()
    return found


def test_neighbours_share_layers():
    by_rank = run_ranks(groups, 4)
    assert by_rank[1] == [(1,), (0, 1, 2, 3), (0, 1), (0, 1), (1, 3), (1, 0), (0, 1, 2, 3), (1,), (1, 0)]
    assert by_rank[2][3:6] == [(2, 3), (0, 2), (0, 1)]


def test_one_process_needs_no_group():
    state = mpu.initialize_model_parallel(1)
    assert (state.rank, state.world_size, mpu.get_model_parallel_group()) == (0, 1, None)
    with pytest.raises(ValueError, match="1 ranks is not divisible"):
        mpu.initialize_model_parallel(2)
