"""Facts that no training run wrote, in a manifest whose hash is right: an error in one line before anything is made."""

from __future__ import annotations

import copy
import json
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from data_utils.files import sealed_lines
from megatron.gpt2.checkpoint.manifest import MANIFEST
from megatron.gpt2.checkpoint.reader import Checkpoint
from megatron.gpt2.checkpoint.source import check_facts
from megatron.gpt2.config import ModelConfig
from megatron.gpt2.config.arguments import parse
from megatron.gpt2.dist.ranks import Ranks
from megatron.gpt2.generate.load_model import load_for_inference
from megatron.gpt2.train.setup import prepare_run
from tests.megatron.gpt2.train.training_runs import finish, start, steps, write_text

GREAT, MODEL = 1 << 40, ["config", "model"]
# Where in the facts, and what else may not stand there; each is also replaced by things of other types.
PLACES: list[tuple[list[str], list[Any]]] = [
    (["config"], [{}]),
    (MODEL, [{}]),
    (["config", "optimizer"], []),
    (["config", "data", "train_data"], ["x", [1]]),
    (["config", "optimizer", "lr"], []),
    (["config", "train", "seed"], [1.0]),
    *(
        ([*MODEL, name], [0, -1, GREAT, 10**400, 1.0])
        for name in ("num_layers", "hidden_size", "max_position_embeddings", "make_vocab_size_divisible_by")
    ),
    ([*MODEL, "num_attention_heads"], [0, 3, GREAT]),
    ([*MODEL, "gelu"], []),
    (["vocab_size"], [0, 7, GREAT]),
    *(([name], [-1, 1.0, 1 << 62]) for name in ("iteration", "train_iters", "consumed_samples", "global_batch_size")),
    (["tokenizer"], [{}]),
    (["tokenizer", "fingerprint"], [3]),
    (["optimizer"], [{}]),
    *((["optimizer", name], [-1, 1.0, 1 << 62]) for name in ("good_steps", "skipped_steps", "adam_steps")),
    (["optimizer", "loss_scaler"], [{"scale": "1"}, {"scale": None}]),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("facts")
    write_text(folder, 300)
    run = start(0, 1, str(folder), ["--hidden-size", "16", "--num-attention-heads", "2", "--num-layers", "1"])
    steps(run, 1)
    path = run.save()
    finish(run)
    assert path is not None
    return Checkpoint(path)


def test_a_run_wrote_what_is_asked_for(saved: Checkpoint) -> None:
    assert check_facts(saved) == ModelConfig(**saved.facts["config"]["model"])
    known = copy.deepcopy(saved.facts)
    known["config"]["model"]["of a later version"] = known["config"]["later"] = {}
    assert check_facts(with_facts(saved, known)) == check_facts(saved)


def with_facts(saved: Checkpoint, facts: dict[str, Any]) -> Any:
    return SimpleNamespace(path=saved.path, tensors=saved.tensors, facts=facts)


@pytest.mark.parametrize(("place", "values"), PLACES, ids=[".".join(place) for place, _ in PLACES])
def test_facts_that_do_not_fit(saved: Checkpoint, place: list[str], values: list[Any]) -> None:
    for value in ["a word", [[]], {"x": None}, True, float("nan"), *values]:
        facts = copy.deepcopy(saved.facts)
        at = facts
        for key in place[:-1]:
            at = at[key]
        if value not in values and type(value) is type(at[place[-1]]):
            continue
        at[place[-1]] = value
        began = time.process_time()
        with pytest.raises(ValueError) as caught:
            check_facts(with_facts(saved, facts))
        assert time.process_time() - began < 1
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 4000


def test_both_ways_in_ask(saved: Checkpoint) -> None:
    manifest = json.loads((saved.path / MANIFEST).read_bytes())
    del manifest["sha256"]
    before = (saved.path / MANIFEST).read_bytes()
    manifest["facts"]["config"]["model"]["num_layers"] = GREAT
    (saved.path / MANIFEST).write_bytes(sealed_lines(manifest))
    folder = saved.path.parent
    try:
        with pytest.raises(ValueError, match=f"tell of {GREAT:,} layers: it holds"):
            prepare_run(parse(["--save", str(folder), "--device", "cpu"]), Ranks(0, 1, 0, 1), print)
        with pytest.raises(ValueError, match=f"tell of {GREAT:,} layers: it holds"):
            load_for_inference(folder, torch.device("cpu"), torch.float32, log=print)
    finally:
        (saved.path / MANIFEST).write_bytes(before)
