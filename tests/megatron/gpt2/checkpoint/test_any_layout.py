"""A checkpoint loads under every layout with equal bits.

The test builds the ranks of a layout one after the other in this process, from the classes that training uses, and
calls `checkpoint_files` and `load_checkpoint`. The test needs no process group, because layers get rank and size as two
integers. ../train/test_growing_batch.py shows that training continues with the same losses.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

import mpu
from megatron.gpt2.checkpoint.reader import NativeCheckpoint
from megatron.gpt2.checkpoint.save_folder import find_checkpoint
from megatron.gpt2.config import CheckpointConfig, Config, DataConfig, ModelConfig, OptimizerConfig
from megatron.gpt2.model.gpt2 import TIED_WEIGHT, GPT2Model
from megatron.gpt2.optimizer.muon import layer_matrices
from megatron.gpt2.optimizer.optimizer import LossScaler, MixedPrecisionOptimizer
from megatron.gpt2.optimizer.param_and_grad_buffer import ParamAndGradBuffer
from megatron.gpt2.pipeline.schedule import layers_of_virtual_stages
from megatron.gpt2.train.checkpointing import checkpoint_files, load_checkpoint
from tests.megatron.gpt2.checkpoint.saved_states import write

# A rank's part of a bucket is a multiple of 64 values and never ends at the end of a row.
HEADS, WIDTH, VOCAB = 8, 24, 29
# {tensor-parallel size: padded vocabulary size}. The last of 4 ranks and the last three of 8 ranks have only padding.
PADDED = {1: 35, 2: 42, 4: 56, 8: 56}
CONFIG = CheckpointConfig(no_save_rng=True, no_load_rng=True)
SHAPE = ModelConfig(
    num_layers=4,
    hidden_size=WIDTH,
    num_attention_heads=HEADS,
    max_position_embeddings=6,
    vocab_size=VOCAB,
    make_vocab_size_divisible_by=7,
)
STATE = ("master", "exp_avg", "exp_avg_sq")
CPU = torch.device("cpu")


class ParallelLayout(NamedTuple):
    model_parallel: int
    data_parallel: int
    sharded: bool = False
    pipeline: int = 1
    chunks: int = 1  # model chunks per rank


LAYOUTS = [ParallelLayout(mp, dp, sharded) for mp in (1, 2, 4) for dp in (1, 2) for sharded in (False, True)]
PIPELINES = [
    ParallelLayout(mp, dp, dp > 1, pp, chunks)
    for mp, dp, pp, chunks in ((1, 1, 2, 2), (2, 1, 2, 1), (1, 2, 2, 1), (1, 1, 4, 1), (2, 2, 2, 2), (2, 1, 3, 1))
]
ALL = [*LAYOUTS, *PIPELINES, ParallelLayout(8, 1), ParallelLayout(8, 2, True)]


def make_rank(layout: ParallelLayout, tp_rank: int, pp_rank: int, dp_rank: int, dtype: torch.dtype, muon: bool) -> Any:
    """Return the attributes of a trainer that `checkpoint_files` and `load_checkpoint` use, for one rank of
    `layout`."""
    group: Any = SimpleNamespace(rank=lambda: tp_rank, size=lambda: layout.model_parallel)
    parallel = mpu.ParallelState(
        tensor_model_parallel_group=group,
        tensor_model_parallel_rank=tp_rank,
        tensor_model_parallel_size=layout.model_parallel,
        pipeline_model_parallel_rank=pp_rank,
        pipeline_model_parallel_size=layout.pipeline,
        data_parallel_rank=dp_rank,
        data_parallel_size=layout.data_parallel,
    )
    stages = layers_of_virtual_stages(SHAPE.num_layers, layout.pipeline, layout.chunks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mpu.initialize._default", parallel)
        model = GPT2Model(SHAPE, layer_ranges=stages[pp_rank :: layout.pipeline])
    buffer = ParamAndGradBuffer(
        model,
        dtype,
        bucket_size=1000 // layout.model_parallel,
        sharded=layout.sharded,
        data_parallel_rank=dp_rank,
        data_parallel_size=layout.data_parallel,
        tied_param=TIED_WEIGHT if layout.pipeline > 1 else None,
        tied_param_is_duplicate=pp_rank > 0,
        muon_params=layer_matrices(model) if muon else (),
    )
    param_gather: Any = Mock()  # There is no other rank to gather parameters from.
    adam = OptimizerConfig()
    optimizer = MixedPrecisionOptimizer(buffer, param_gather, adam, LossScaler(adam, dtype, CPU), torch.ones(10))
    return SimpleNamespace(
        parallel=parallel, model=model, buffer=buffer, param_gather=param_gather, optimizer=optimizer
    )


def ranks_of(layout: ParallelLayout, dtype: torch.dtype, muon: bool = False) -> list[Any]:
    return [
        make_rank(layout, mp, pp, dp, dtype, muon)
        for pp in range(layout.pipeline)
        for dp in range(layout.data_parallel)
        for mp in range(layout.model_parallel)
    ]


def global_state(muon: bool = False) -> dict[tuple[str, str], Tensor]:
    """Return random global tensors without padding in float32, by kind and name. With `muon`, matrices have only the
    first moment."""
    draw = torch.Generator().manual_seed(1)
    (rank,) = ranks_of(ParallelLayout(1, 1), torch.float32)
    shapes = {name: spec.global_shape for name, spec in mpu.partition_specs(rank.model).items()}
    assert len(shapes) == 2 + 12 * SHAPE.num_layers + 2
    without = set(layer_matrices(rank.model)) if muon else set()
    return {
        (kind, name): torch.randn(shape, generator=draw)
        for kind in STATE
        for name, shape in shapes.items()
        if kind != "exp_avg_sq" or name not in without
    }


def own_part(name: str, whole: Tensor, rank: int, size: int, padding: float) -> Tensor:
    """Return the shard of `rank`, computed without `PartitionSpec`, as a second implementation of the slicing rule."""
    if name == "word_embeddings.weight":
        rows = PADDED[size] // size
        own = torch.full((rows, WIDTH), padding)
        true = whole[rank * rows : (rank + 1) * rows]
        own[: len(true)] = true
        return own
    if "query_key_value" in name:  # The query, key and value of a head are adjacent.
        heads = HEADS // size
        by_head = whole.view(HEADS, 3 * WIDTH // HEADS, *whole.shape[1:])
        return by_head[rank * heads : (rank + 1) * heads].flatten(0, 1)
    if "dense_h_to_4h" in name:
        return whole.chunk(size, dim=0)[rank]
    if name.endswith(("attention.dense.weight", "dense_4h_to_h.weight")):
        return whole.chunk(size, dim=1)[rank].contiguous()
    return whole


def fill(rank: Any, state: dict[tuple[str, str], Tensor], padding: float) -> None:
    place = rank.parallel.tensor_model_parallel_rank, rank.parallel.tensor_model_parallel_size
    for name, parameter in rank.model.named_parameters():
        parameter.data.copy_(own_part(name, state["master", name], *place, padding))
    for kind, name, values, start in rank.optimizer.state_shards():
        values.copy_(own_part(name, state[kind, name], *place, padding).reshape(-1)[start : start + values.numel()])


def save(folder: Path, ranks: Iterable[Any]) -> None:
    """Save the files of all ranks as one checkpoint."""
    files: dict[str, Any] = {}
    metadata: dict[str, Any] = {}
    for rank in ranks:
        of_rank = checkpoint_files(rank, rank.parallel, CONFIG, CPU)
        assert not of_rank.keys() & files.keys()
        files.update(of_rank)
        metadata = {"optimizer": rank.optimizer.state_dict(), "consumed_samples": 24}
    write(folder, 3, files, metadata=metadata)


def assert_loads(checkpoint: NativeCheckpoint, rank: Any, state: dict[tuple[str, str], Tensor]) -> int:
    """Load the checkpoint into buffers of NaN. Return the number of elements of the masters that the rank owns."""
    place = rank.parallel.tensor_model_parallel_rank, rank.parallel.tensor_model_parallel_size
    for values in (rank.buffer.params, *(s.values for s in rank.optimizer.state_shards())):
        values.fill_(torch.nan)
    config = Config(model=SHAPE, checkpoint=CONFIG, data=DataConfig(seq_length=6))
    metadata = {"config": config.as_dict(), "train_iters": 3, "decay_iters": 3, "precision": "", "computed_by": ""}
    source = str(checkpoint.path.parent)
    context: Any = SimpleNamespace(source=source, device=CPU, config=config, metadata=lambda: metadata)
    # `find_checkpoint` needs a process group, so let it return the checkpoint that the test opened.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatron.gpt2.train.checkpointing.find_checkpoint", lambda source, **_: checkpoint)
        assert load_checkpoint(context, rank.parallel, rank, lambda line: None) == (3, 24, 0)
    owned = 0
    for kind, name, values, start in rank.optimizer.state_shards():
        expected = own_part(name, state[kind, name], *place, 0.0).reshape(-1)[start : start + values.numel()]
        assert torch.equal(values, expected), (kind, name)
        owned += values.numel() if kind == "master" else 0
    for name in rank.buffer.ranges:
        index, part, _ = rank.buffer.owned_part(name)
        rounded = rank.buffer.params[rank.buffer.owned_ranges[index].range][part]
        assert torch.equal(rounded, rank.buffer.masters[index][part].to(rounded.dtype)), name
    return owned


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((torch.float32, False), marks=pytest.mark.wide),
        pytest.param((torch.float32, True), marks=pytest.mark.wide),
        (torch.bfloat16, False),
    ],
    ids=["fp32", "muon", "bf16"],
)
def saved(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[dict[ParallelLayout, Path], Any, torch.dtype, bool]]:
    """Save one state under every layout. Return the folder of each layout."""
    state, folders = global_state(request.param[1]), {}
    for layout in ALL:
        ranks = ranks_of(layout, *request.param)
        for rank in ranks:
            fill(rank, state, padding=torch.nan)  # The values in the padding must not be saved.
        folders[layout] = tmp_path_factory.mktemp("layout")
        save(folders[layout], ranks)
    yield folders, state, *request.param


@pytest.mark.parametrize("target", ALL, ids=lambda layout: "_".join(map(str, layout)))
def test_opens_every_other_layout(saved: Any, target: ParallelLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    # Starting threads would take longer than copying these small tensors.
    monkeypatch.setattr("megatron.gpt2.checkpoint.sharded_state.in_threads", lambda work, items: [*map(work, items)])
    folders, state, dtype, muon = saved
    ranks = ranks_of(target, dtype, muon)
    sources = ALL if dtype == torch.float32 else ALL[ALL.index(target) % 7 :: 7]  # The wide set has all pairs.
    in_memory = sum(
        parameter.numel()
        for rank in ranks
        if rank.parallel.data_parallel_rank == 0
        for parameter in rank.model.parameters()
    )
    for source in sources:
        checkpoint = find_checkpoint(folders[source], log=pytest.fail)
        owned = sum(assert_loads(checkpoint, rank, state) for rank in ranks)
        assert owned == in_memory * (1 if target.sharded else target.data_parallel), source
