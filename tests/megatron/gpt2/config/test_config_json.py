"""config.json of a run, and --config, which repeats the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.gpt2.commands import pretrain_gpt2
from megatron.gpt2.config import read_config
from megatron.gpt2.config.arguments import parse
from tests.test_command_line import FLAGS, metrics, work  # noqa: F401


def test_config_repeats_a_run(work: Path, capfd: pytest.CaptureFixture[str]):  # noqa: F811
    flags = [*FLAGS, *"--train-data text.txt --eval-iters 0 --log-interval 1 --save a".split()]
    assert pretrain_gpt2.main([*flags, *"--train-iters 3 --hidden-dropout 0.2".split()]) == 0
    before = [record["lm_loss"] for record in metrics(work / "a")]

    assert pretrain_gpt2.main(["--config", "a/config.json"]) == 0
    assert "a is finished" in capfd.readouterr().out
    assert pretrain_gpt2.main("--config a/config.json --save b".split()) == 0
    assert [record["lm_loss"] for record in metrics(work / "b")] == before
    assert (
        pretrain_gpt2.main("--config a/config.json --save c --micro-batch-size 2 --seed 7 --train-iters 2".split()) == 0
    )
    said = capfd.readouterr().out
    assert "2 samples × 1 data-parallel ranks × 2 accumulated = 4 a step" in said
    assert len(metrics(work / "c")) == 2 and metrics(work / "c")[0]["lm_loss"] != before[0]

    # config.json of a fine-tuned run keeps --load and --finetune after the run was continued.
    tune = "--finetune --load a --train-data text.txt --save d --eval-iters 0 --log-interval 1".split()
    assert pretrain_gpt2.main([*tune, "--train-iters", "2"]) == 0
    first = metrics(work / "d")[0]["lm_loss"]
    assert pretrain_gpt2.main("--load d --train-iters 3 --exit-interval 3".split()) == 0
    assert pretrain_gpt2.main("--config d/config.json --save e --exit-interval 1".split()) == 0
    assert metrics(work / "e")[0]["lm_loss"] == first


@pytest.fixture
def config(tmp_path: Path) -> Path:
    line = "--num-layers 2 --lr 1e-3 --train-data a --load s --save s --vocab-size 9"
    settings = {"version": 1, "global_batch_size": 8, "config": parse(line.split()).config.as_dict()}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(settings))
    return path


def test_only_non_default_values_are_read(config: Path):
    assert read_config(str(config)) == {
        "model.num_layers": 2,
        "optimizer.lr": 1e-3,
        "data.train_data": ("a",),
        "train.train_iters": 1_000_000,
        "train.global_batch_size": 8,
        "checkpoint.save": "s",
    }


def test_flags_win_over_the_file(config: Path):
    arguments = parse(["--config", str(config), *"--lr 2e-3 --data-path p --train-samples 9".split()])
    config_ = arguments.config
    assert (config_.optimizer.lr, config_.data.train_data, config_.data.data_path) == (2e-3, (), ("p",))
    assert (config_.train.train_iters, config_.train.train_samples, config_.model.num_layers) == (None, 9, 2)
    assert "model.num_layers" in arguments.given and arguments.preset is None


@pytest.mark.parametrize(
    "change, message",
    [
        ({"version": 2}, "it has version 2, and this program reads version 1"),
        ({"config": {"model": {"depth": 3}}}, "unknown in the configuration: model.depth"),
        ({"config": {"modell": {"a": 1}}}, "unknown in the configuration: modell.a"),
        ({"config": {"model": {"num_layers": "two"}}}, "is not the config.json of a run"),
        ({"config": {"model": {"num_layers": 0}}}, "--num-layers must be positive"),
        ({"config": None}, "is not the config.json of a run"),
        ({"global_batch_size": None}, "is not the config.json of a run"),
    ],
)
def test_errors_of_a_config_file(config: Path, change: dict[str, Any], message: str):
    config.write_text(json.dumps({**json.loads(config.read_text()), **change}))
    with pytest.raises(ValueError) as error:
        parse(["--config", str(config)])
    assert str(error.value).startswith(f"--config {config}") and message in str(error.value)


def test_a_missing_file_bad_json_and_a_given_model(config: Path):
    with pytest.raises(FileNotFoundError, match="--config nowhere: No such file"):
        parse(["--config", "nowhere"])
    with pytest.raises(ValueError, match="give --model or --config, not both"):
        parse(["--config", str(config), "--model", "345m"])
    for text in ("{", "[]", "\xff"):
        config.write_bytes(text.encode("latin-1"))
        with pytest.raises(ValueError, match="--config "):
            parse(["--config", str(config)])
