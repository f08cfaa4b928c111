from __future__ import annotations

from unittest import mock

import pytest
import torch

from mpu.partition import PartitionSpec, check_ids, padded_vocab_size


def test_vocabulary_padding_does_not_depend_on_the_layout():
    assert [padded_vocab_size(50257, 128, p) for p in (1, 2, 4, 8, 16, 32, 64, 128)] == [50304] * 8
    assert padded_vocab_size(50257, 256, 2) == 50432
    assert padded_vocab_size(257, 128, 3) % 3 == 0


@pytest.mark.parametrize(
    "spec",
    [
        PartitionSpec((12, 5), 0),
        PartitionSpec((5, 12), 1),
        PartitionSpec((12,), 0),
        PartitionSpec((7, 3)),
        PartitionSpec((13, 4), 0, 16),
        PartitionSpec((3, 2), 0, 16),  # With 4 ranks, three ranks have only padding.
    ],
)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_split_and_merge_are_inverse(spec: PartitionSpec, world_size: int):
    full = torch.randn(spec.global_shape)
    shards = [spec.split(full, rank, world_size) for rank in range(world_size)]
    assert all(tuple(shard.shape) == spec.local_shape(world_size) for shard in shards)
    assert torch.equal(spec.merge(shards), full)
    if spec.dim is not None:  # No element is on two ranks, and padding is zero.
        assert sum(shard.abs().sum().item() for shard in shards) == pytest.approx(full.abs().sum().item())


@pytest.mark.parametrize("bad", [-100, -1, 10])
def test_an_id_outside_the_vocabulary(bad: int):
    """On a CPU the host raises the error. A GPU raises the error on the device, because the host does not wait."""
    ids = torch.tensor([[0, 9], [bad, 5]])
    with pytest.raises(IndexError, match=f"^the target {bad} is not in the vocabulary, 0 to 9; to leave a token out, "):
        check_ids(ids, 10, "target")
    with (
        mock.patch("torch.compiler.is_compiling", return_value=True),
        pytest.raises(RuntimeError, match="a target is not in the vocabulary, 0 to 9; to leave a token out, "),
    ):
        check_ids(ids, 10, "target")
    check_ids(ids.clamp(0, 9), 10, "target")
    check_ids(ids.to("meta"), 10, "target")
