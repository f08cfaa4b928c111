"""The table of flags against the lists of names in `flag_lists/`, and what becomes of flags that ask for something."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron.gpt2.config.arguments import parse
from megatron.gpt2.config.flags import build_parser, flag_table
from megatron.gpt2.config.foreign import FOREIGN
from tests.conftest import tool

ROOT = Path(__file__).resolve().parents[4]
LISTS = {path.stem: path for path in (ROOT / "tests/megatron/gpt2/config/flag_lists").glob("*.txt")}
COUNTS = {
    "megatron-2019": 100,
    "deepspeed-examples": 93,
    "megatron-gpt3-example": 34,
    "megatron-v1-v2": 173,
    "deepspeed-examples-v1.1.5": 136,
}


def names(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines() if not line.startswith("#")]


@pytest.mark.parametrize("source", COUNTS)
def test_every_flag_of_each_program_is_in_the_table(source: str):
    known = {row[0] for row in flag_table()}
    asked = names(LISTS[source])
    assert len(asked) == COUNTS[source]
    assert [name for name in asked if name.replace("_", "-") not in known] == []
    parser = build_parser()
    assert all(name.replace("_", "-") in parser._option_string_actions for name in asked)


def test_every_refusal_names_the_flag_and_an_alternative():
    refused = [(name, row) for row in FOREIGN if row.status == "refused" for name in row.flags]
    assert len(refused) >= 30
    for name, row in refused:
        with pytest.raises(ValueError) as error:
            parse([name] + (["1"] if row.values not in (0, "?") else []))
        assert str(error.value).startswith(name) and str(error.value).endswith(row.text)
        assert re.search(r"--[a-z]|leave|take it out|evaluate_gpt2|tools/", row.text), row.text


@pytest.mark.parametrize(
    "line, message",
    [
        ("--pretrained-bert", "a flag of BERT's"),
        ("--zero-stage 3", "--zero-stage 3 is not built: data-parallel ranks each keep all weights; 2 gives the same"),
        ("--zero-stage two", "--zero-stage two is no stage of ZeRO"),
        ("--pipe-parallel-size x", "--pipe-parallel-size x is not a number of stages"),
        ("--remote-device nvme", "only none: weights stay on the device"),
        ("--swiglu --num-experts 8", "leave it out; --num-experts 8 is not supported"),  # all that is refused at once
        ("--use-npy-data-loader", "give loose JSON or text with --train-data"),
        ("--load-openai --load x", "tools/checkpoint.py convert"),
        ("--num-experts 8", "no part of GPT-2"),
        ("--tokenizer-model-type unigram", "only bpe or bert"),
        ("--no-bias-gelu-fusion --gelu tanh", "--no-bias-gelu-fusion contradicts --gelu tanh"),
    ],
)
def test_refused(line: str, message: str):
    with pytest.raises(ValueError) as error:
        parse(line.split())
    assert message in str(error.value) and "\n" not in str(error.value)


def test_translated():
    assert parse(["--no-bias-gelu-fusion"]).config.model.gelu == "erf"
    assert parse(["--no-bias-gelu-fusion", "--openai-gelu"]).config.model.gelu == "tanh"
    assert parse(["--scattered-embeddings"]).config.parallel.sequence_parallel
    assert parse(["--zero-stage", "1"]).config.parallel.use_distributed_optimizer
    assert not parse(["--zero-stage", "1"]).config.parallel.shard_gradients
    second = parse(["--zero-stage", "2"]).config.parallel
    assert second.use_distributed_optimizer and second.shard_gradients
    assert not parse(["--zero-stage", "0"]).config.parallel.use_distributed_optimizer
    assert [parse(["--pipe-parallel-size", word]).config.parallel.pipeline_model_parallel_size for word in "012"] == [
        1,
        1,
        2,
    ]
    assert parse(["--warmup-iters", "7"]).config.optimizer.lr_warmup_iters == 7


def test_the_page_of_flags_is_made_of_the_table():
    page = tool("flag_table").page()
    (row,) = (line for line in page.splitlines() if "`--context-parallel-size`" in line)
    assert row.endswith(
        "| inert | 1 alone, any other value being refused: layouts are tensor-, pipeline- and "
        "data-parallel: use --model-parallel-size |"
    )
    assert (ROOT / "docs" / "reference" / "flags.md").read_text() == page, (
        "python tools/flag_table.py > docs/reference/flags.md"
    )
