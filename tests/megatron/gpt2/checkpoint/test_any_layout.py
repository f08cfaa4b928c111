"""A checkpoint opens under every layout to the last bit.

The ranks of a layout are made one after the other in this process, of the classes that training makes them of, and go
through `checkpoint_files` and `load_run`. No process group exists; a layer is told its rank and size by two integers.
That training goes on as if nothing had moved is in test_moved_training.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import mpu
from megatron.gpt2.checkpoint.folder import find_checkpoint
from megatron.gpt2.checkpoint.reader import Checkpoint
from megatron.gpt2.checkpoint.state import load_state, whole_parameters
from megatron.gpt2.config import CheckpointConfig, Config, DataConfig, ModelConfig, OptimizerConfig
from megatron.gpt2.model.gpt2 import TIED, GPT2Model, parameter_specs
from megatron.gpt2.optimizer.flat_parameters import FlatParameters
from megatron.gpt2.optimizer.optimizer import AdamWOptimizer, build_loss_scaler
from megatron.gpt2.pipeline.schedule import layers_of_stages
from megatron.gpt2.train.checkpointing import checkpoint_files, load_run
from tests.megatron.gpt2.checkpoint.moved_runs import LAYOUTS, PIPELINES, Layout
from tests.megatron.gpt2.checkpoint.saved_states import write

HEADS, WIDTH, VOCAB = 8, 24, 29  # no rank's part of a bucket, a multiple of 64, ends where a row does
# The padding differs at every size; of 4 ranks the last holds padding alone, and of 8 the last three.
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


EIGHT = [Layout(8, 1), Layout(8, 2, True)]
BESIDE_EIGHT = [Layout(1, 1), Layout(2, 2, True)]
ALL = LAYOUTS + PIPELINES + EIGHT


class Group(NamedTuple):
    """All that a layer asks its group for when it is made."""

    own_rank: int
    ranks: int

    def rank(self) -> int:
        return self.own_rank

    def size(self) -> int:
        return self.ranks


class Alone:
    """In the place of `ParameterGatherer`: nobody is there to gather parameters from."""

    def wait(self) -> None: ...

    def launch(self) -> None: ...


def make_rank(layout: Layout, mp_rank: int, pp_rank: int, dp_rank: int, dtype: torch.dtype) -> Any:
    """What `checkpoint_files` and `load_run` use of a run, for one rank of `layout`."""
    group: Any = Group(mp_rank, layout.model_parallel)
    parallel = mpu.ParallelState(
        tensor_model_parallel_group=group,
        tensor_model_parallel_rank=mp_rank,
        tensor_model_parallel_size=layout.model_parallel,
        pipeline_model_parallel_rank=pp_rank,
        pipeline_model_parallel_size=layout.pipeline,
        data_parallel_rank=dp_rank,
        data_parallel_size=layout.data_parallel,
    )
    stages = layers_of_stages(SHAPE.num_layers, layout.pipeline, layout.chunks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mpu.initialize._default", parallel)
        model = GPT2Model(SHAPE, chunks=stages[pp_rank :: layout.pipeline])
    flat = FlatParameters(
        model,
        dtype,
        bucket_size=1000 // layout.model_parallel,
        sharded=layout.sharded,
        ranks=(dp_rank, layout.data_parallel),
        shared=TIED if layout.pipeline > 1 else None,
        is_copy=pp_rank > 0,
    )
    gatherer: Any = Alone()
    adam = OptimizerConfig()
    optimizer = AdamWOptimizer(flat, gatherer, adam, build_loss_scaler(adam, dtype, CPU), torch.ones(10))
    return SimpleNamespace(parallel=parallel, model=model, flat=flat, gatherer=gatherer, optimizer=optimizer)


def ranks_of(layout: Layout, dtype: torch.dtype) -> list[Any]:
    return [
        make_rank(layout, mp, pp, dp, dtype)
        for pp in range(layout.pipeline)
        for dp in range(layout.data_parallel)
        for mp in range(layout.model_parallel)
    ]


def global_state() -> dict[tuple[str, str], Tensor]:
    """The whole true tensors, float32 of full precision, by kind and name."""
    draw = torch.Generator().manual_seed(1)
    (rank,) = ranks_of(Layout(1, 1), torch.float32)
    shapes = {name: spec.global_shape for name, spec in mpu.partition_specs(rank.model).items()}
    assert len(shapes) == 2 + 12 * SHAPE.num_layers + 2
    return {(kind, name): torch.randn(shape, generator=draw) for kind in STATE for name, shape in shapes.items()}


def own_part(name: str, whole: Tensor, rank: int, size: int, padding: float) -> Tensor:
    """What `rank` holds of `whole`: the slicing rule, told once more in other words."""
    if name == "word_embeddings.weight":
        rows = PADDED[size] // size
        own = torch.full((rows, WIDTH), padding)
        true = whole[rank * rows : (rank + 1) * rows]
        own[: len(true)] = true
        return own
    if "query_key_value" in name:  # query, key and value of a head are neighbours
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
    for kind, name, values, start in rank.optimizer.tensors():
        values.copy_(own_part(name, state[kind, name], *place, padding).reshape(-1)[start : start + values.numel()])


def save(folder: Path, ranks: Iterable[Any]) -> None:
    """What a run writes of every rank, into one checkpoint."""
    files: dict[str, Any] = {}
    facts: dict[str, Any] = {}
    for rank in ranks:
        of_rank = checkpoint_files(rank, rank.parallel, CONFIG, CPU)
        assert not of_rank.keys() & files.keys()
        files.update(of_rank)
        facts = {"optimizer": rank.optimizer.state_dict(), "consumed_samples": 24}
    write(folder, 3, files, facts=facts)


def assert_loads(checkpoint: Checkpoint, rank: Any, state: dict[tuple[str, str], Tensor]) -> int:
    """Into memory that holds NaN. Returns how many elements of the masters the rank owns."""
    place = rank.parallel.tensor_model_parallel_rank, rank.parallel.tensor_model_parallel_size
    for values in (rank.flat.params, *(s.values for s in rank.optimizer.tensors())):
        values.fill_(torch.nan)
    config = Config(model=SHAPE, checkpoint=CONFIG, data=DataConfig(seq_length=6))
    facts = {"config": config.as_dict(), "train_iters": 3, "decay_iters": 3, "precision": "", "computed_by": ""}
    source = str(checkpoint.path.parent)
    prepared: Any = SimpleNamespace(source=source, device=CPU, config=config, facts=lambda: facts)
    with pytest.MonkeyPatch.context() as patch:  # found once: the ranks need not agree on what is there
        patch.setattr("megatron.gpt2.train.checkpointing.find_checkpoint", lambda source, **_: checkpoint)
        assert load_run(prepared, rank.parallel, rank, lambda line: None) == (3, 24, 0)
    owned = 0
    for kind, name, values, start in rank.optimizer.tensors():
        expected = own_part(name, state[kind, name], *place, 0.0).reshape(-1)[start : start + values.numel()]
        assert torch.equal(values, expected), (kind, name)
        owned += values.numel() if kind == "master" else 0
    for name in rank.flat.ranges:
        index, part, _ = rank.flat.owned_part_of(name)
        rounded = rank.flat.params[rank.flat.owned[index].range][part]
        assert torch.equal(rounded, rank.flat.masters[index][part].to(rounded.dtype)), name
    # The weights that were saved beside them, as generation and fine-tuning without an optimizer read them.
    rank.flat.params.fill_(torch.nan)
    load_state(
        whole_parameters(rank.model.named_parameters()),
        parameter_specs(SHAPE, place[1]),
        checkpoint,
        mp_rank=place[0],
        mp_size=place[1],
    )
    for name, parameter in rank.model.named_parameters():
        expected = own_part(name, state["master", name], *place, 0.0)
        assert torch.equal(parameter, expected.to(parameter.dtype)), name
    return owned


@pytest.fixture(
    scope="module", params=[pytest.param(torch.float32, marks=pytest.mark.wide), torch.bfloat16], ids=["fp32", "bf16"]
)
def saved(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[dict[Layout, Path], Any, torch.dtype]]:
    """The same state, saved under every layout."""
    state, folders = global_state(), {}
    for layout in ALL:
        ranks = ranks_of(layout, request.param)
        for rank in ranks:
            fill(rank, state, padding=torch.nan)  # what is in the padding must not matter
        folders[layout] = tmp_path_factory.mktemp("layout")
        save(folders[layout], ranks)
    yield folders, state, request.param


@pytest.mark.parametrize("target", ALL, ids=str)
def test_opens_every_other_layout(saved: Any, target: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    # To start threads takes longer than to copy so little.
    monkeypatch.setattr("megatron.gpt2.checkpoint.state.in_threads", lambda work, items: [*map(work, items)])
    folders, state, dtype = saved
    ranks = ranks_of(target, dtype)
    assert len(folders) == 22 and len(ranks) == target.world_size
    sources = BESIDE_EIGHT if target in EIGHT else LAYOUTS + PIPELINES + EIGHT * (target in BESIDE_EIGHT)
    if dtype != torch.float32:  # which has every pair, in the wide set
        sources = sources[ALL.index(target) % 4 :: 4]
    in_memory = sum(
        parameter.numel()
        for rank in ranks
        if rank.parallel.data_parallel_rank == 0
        for parameter in rank.model.parameters()
    )
    for source in sources:
        checkpoint = find_checkpoint(folders[source], log=pytest.fail)
        assert checkpoint is not None
        owned = sum(assert_loads(checkpoint, rank, state) for rank in ranks)
        assert owned == in_memory * (1 if target.sharded else target.data_parallel), source


def test_the_matrix_is_about_different_things(saved: Any) -> None:
    """Each sharded layout really saves parts that others cut elsewhere, and padding is in no file."""
    folders, state, dtype = saved
    for layout, folder in folders.items():
        checkpoint = Checkpoint(folder / "iter_0000003")
        assert checkpoint.tensors["master.word_embeddings.weight"].shape == (VOCAB, WIDTH)
        masters = [name for name in checkpoint.files if "/master" in name]
        split = layout.sharded and layout.data_parallel > 1
        assert len(masters) == layout.model_parallel * layout.pipeline * (layout.data_parallel if split else 1)
        assert split == any("#1" in key for info in checkpoint.files.values() for key in info.boxes), (
            "rows and part of a row"
        )
        expected = torch.float32 if dtype == torch.float32 else torch.bfloat16
        assert checkpoint.read("model.word_embeddings.weight").dtype == expected
        for (kind, name), whole in state.items():
            assert torch.equal(checkpoint.read(f"{kind}.{name}"), whole), (layout, kind, name)
