from __future__ import annotations

import pytest
import torch

from mpu.partition import Box, PartitionSpec, divide, padded_vocab_size


def test_vocabulary_padding_does_not_depend_on_the_layout():
    assert [padded_vocab_size(50257, 128, p) for p in (1, 2, 4, 8, 16, 32, 64, 128)] == [50304] * 8
    assert padded_vocab_size(50257, 256, 2) == 50432
    assert padded_vocab_size(257, 128, 3) % 3 == 0


def test_divide_refuses_a_remainder():
    assert divide(12, 4) == 3
    with pytest.raises(ValueError, match="12 is not divisible by 5"):
        divide(12, 5)


@pytest.mark.parametrize("spec", [
    PartitionSpec((12, 5), 0), PartitionSpec((5, 12), 1), PartitionSpec((12,), 0), PartitionSpec((7, 3)),
    PartitionSpec((13, 4), 0, 16), PartitionSpec((3, 2), 0, 16),  # the last: ranks that hold padding alone
])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_split_and_merge_are_inverse(spec: PartitionSpec, world_size: int):
    full = torch.randn(spec.global_shape)
    shards = [spec.split(full, rank, world_size) for rank in range(world_size)]
    assert all(tuple(shard.shape) == spec.local_shape(world_size) for shard in shards)
    assert torch.equal(spec.merge(shards), full)
    if spec.dim is not None:
        # Boxes cover the true tensor once; padding is zero.
        counted = torch.zeros(spec.global_shape)
        for rank in range(world_size):
            counted[spec.box(rank, world_size).slices()] += 1
        assert torch.equal(counted, torch.ones_like(counted))
        assert sum(shard.abs().sum().item() for shard in shards) == pytest.approx(full.abs().sum().item())


def test_boxes_of_a_padded_vocabulary():
    spec = PartitionSpec((50257, 8), 0, 50304)
    assert spec.box(1, 2) == Box((25152, 0), (25105, 8))
    assert spec.local_shape(2) == (25152, 8)
    assert spec.box(0, 1).numel == 50257 * 8
