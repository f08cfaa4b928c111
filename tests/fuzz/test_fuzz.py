"""Fuzz every target with a few fixed seeds, and test the defects that other seeds once found."""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_utils.files import read_checksummed_json, write_checksummed_json
from data_utils.indexed_dataset import IndexedDatasetBuilder, read_manifest, write_manifest
from data_utils.tokenizers import build_tokenizer, load_tokenizer
from data_utils.tokenizers.gpt2 import BUILTIN_FILE, builtin_tokenizer, gpt2_tokenizer
from megatron.gpt2.commands import inspect_data
from megatron.gpt2.config import Config, compat, read_config, write_config
from megatron.gpt2.monitor.incidents import read_records
from megatron.gpt2.monitor.run_report import render_page
from tests.fuzz import fuzzing, targets
from tests.fuzz.fuzzing import Input, Target
from tests.fuzz.targets import small_bpe, update_pair_checksum

TARGETS = {target.name: target for target in targets.TARGETS}
# The number of inputs for each target, from seed 0. Reading a whole model, or drawing a report, takes the longest.
INPUTS, MODEL_INPUTS = 40, 8


@pytest.mark.parametrize("name", TARGETS)
def test_inputs_are_taken_or_refused(tmp_path: Path, name: str) -> None:
    given = Input(TARGETS[name], tmp_path / "input")
    inputs = MODEL_INPUTS if TARGETS[name].model else INPUTS
    outcomes = {seed: given.attempt(seed) for seed in range(inputs)}
    # A garbage collection or a busy machine can make an input slow; drawing a report takes 0.3 s to 1 s. So a slow input is
    # tried again, and may take a second longer than the valid input.
    outcomes |= {
        seed: given.attempt(seed, given.valid_seconds()) for seed, outcome in outcomes.items() if outcome[0] == "slow"
    }
    findings = {seed: outcome for seed, outcome in outcomes.items() if outcome[0] not in ("accepted", "refused")}
    assert not findings
    assert len({given.changed(seed)[file] for seed in outcomes for file in given.changed(seed)}) > len(outcomes) // 3


def bad_reader(name: str) -> Target:
    """A reader of a file of ten bytes with a defect at about every fourth seed."""
    kept: list[bytes] = []

    def read(folder: Path) -> None:
        data = (folder / "x").read_bytes()
        if data == b"0123456789":
            return
        if name == "exception":
            {b"": 0}[data]
        elif name == "invariant":
            assert len(data) == 10, "another length"
        elif name == "slow":
            start = time.process_time()
            while time.process_time() - start < 0.1:
                pass
        elif name == "memory":
            kept.append(b"x" * (100 << 20))
        elif name == "no line":
            raise ValueError(f"{folder}: two\nlines")
        elif name == "names nothing":
            raise ValueError("somewhere")

    return Target(name, lambda folder: (folder / "x").write_bytes(b"0123456789"), read)


@pytest.mark.parametrize("name", ["exception", "invariant", "slow", "memory", "no line", "names nothing"])
def test_a_defect_is_found(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "slow":
        monkeypatch.setattr(fuzzing, "MAX_SECONDS", 0.05)
    given = Input(bad_reader(name), tmp_path / "input")
    found = {given.attempt(seed)[0].partition(":")[0] for seed in range(3 if name in ("slow", "memory") else 30)}
    assert name in found


# --- defects that changed inputs have shown, each made by hand -------------------------------------------------------

NESTED = "[" * 100_000


def assert_refused(match: str) -> Any:
    return pytest.raises(ValueError, match=match)


def assert_short(caught: Any) -> None:
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    builder = IndexedDatasetBuilder(tmp_path / "a", np.dtype("<u2"))
    builder.add([1, 2, 3])
    builder.end_document()
    builder.finish()
    return tmp_path / "a"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (".bin", None),
        (".idx", [{"bytes": "3", "sha256": ""}]),
        (".bin", [{"sha256": ""}]),
        ("inputs", [{}]),
        ("inputs", 3),
        ("tokenizer", {"kind": "bytes"}),
        ("tokenizer", 7),
        ("documents", "1"),
        ("tokens", -1),
        ("text_bytes", "many"),
    ],
)
def test_a_pair_whose_manifest_is_of_another_form(pair: Path, name: str, value: Any) -> None:
    """The manifest has a correct hash."""
    manifest = write_manifest(pair, {"inputs": [{"file": "a.txt"}], "tokenizer": None})
    assert read_manifest(pair) == json.loads(json.dumps(manifest))
    write_checksummed_json(pair.with_suffix(".json"), {**manifest, name: value})
    with assert_refused(r"a\.json: ") as caught:
        inspect_data.main([str(pair)])
    assert_short(caught)


def test_a_pair_whose_manifest_holds_half_a_character(pair: Path) -> None:
    entries = json.dumps({**write_manifest(pair, {"tokenizer": None}), "inputs": [{"file": "\ud800"}]}, indent=1)
    files = {"document.json": entries.removesuffix("\n}").encode()}
    update_pair_checksum(files)
    pair.with_suffix(".json").write_bytes(files["document.json"])
    with assert_refused(r"a\.json: .*surrogates") as caught:
        inspect_data.main([str(pair)])
    assert_short(caught)


def test_an_unknown_key_of_deepspeed_stays_in_its_line(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"a\\n\\ud800": 1}')
    (note,) = compat.read_deepspeed_config(str(tmp_path / "ds.json"), {}).notes
    assert '"a\\n\\ud800": unknown keys' in note and "\n" not in note


def test_a_pair_without_text(pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All tokens are ends of documents, so the tokens have no bytes of text."""
    counts = {"text_bytes": 5, "append_eod": True, "bad_lines": 0, "empty_documents": 0}
    manifest = write_manifest(pair, {"inputs": [], "tokenizer": None, **counts})
    write_checksummed_json(pair.with_suffix(".json"), {**manifest, "tokens": 1})
    assert inspect_data.main([str(pair)]) == 0 and "5 bytes of text" in capsys.readouterr().out


@pytest.mark.parametrize("body", ['{"a": 1', f'{{"a": {NESTED}', '["a"', '{"a": 1, "a": 2'])
def test_a_sealed_file_of_no_object(tmp_path: Path, body: str) -> None:

    (tmp_path / "x.json").write_text(f'{body},\n "sha256": "{hashlib.sha256(body.encode()).hexdigest()}"\n}}\n')
    if body == '{"a": 1':
        assert read_checksummed_json(tmp_path / "x.json") == {"a": 1}
        return
    with assert_refused(r"x\.json") as caught:
        read_checksummed_json(tmp_path / "x.json")
    assert_short(caught)


def test_tokenizer_files_that_are_nested_deeply_or_hold_long_names(tmp_path: Path) -> None:
    builtin_tokenizer().save(tmp_path)
    facts = tmp_path / "tokenizer_facts.json"
    for content in (NESTED.encode(), b'{"kind": "' + b"x" * 5000 + b'", "fingerprint": ""}', b'\xff{"' + b"a" * 9000):
        facts.write_bytes(content)
        with assert_refused(r"tokenizer_facts\.json is damaged") as caught:
            load_tokenizer(tmp_path)
        assert_short(caught)
    (tmp_path / BUILTIN_FILE).write_text(NESTED)
    with assert_refused(r"builtin_bpe\.json is damaged"):
        builtin_tokenizer(tmp_path / BUILTIN_FILE)
    files = small_bpe()
    with assert_refused("lacks the token") as caught:
        gpt2_tokenizer(files["vocab.json"], b"x" * 9000 + b" y\n", "--vocab-file a", "--merge-file b")
    assert_short(caught)


def test_a_sentencepiece_model_with_a_piece_that_is_no_text(tmp_path: Path) -> None:
    from data_utils.tokenizers.base import train_sentencepiece

    train_sentencepiece(["the cat sat on the mat. " * 20], tmp_path / "m", 290)
    model = (tmp_path / "m").read_bytes()
    (tmp_path / "m").write_bytes(model.replace("\u2581c".encode(), b"\xff\xff\xffc"))
    assert (tmp_path / "m").read_bytes() != model
    with assert_refused("is not a SentencePiece model"):
        build_tokenizer("SentencePieceTokenizer", model_file=str(tmp_path / "m"))


def test_records_with_damaged_lines_are_read_without_them(tmp_path: Path) -> None:
    """A flipped bit in metrics.jsonl once stopped a run that was resumed."""
    good = {"iteration": 3, "lm_loss": 2.0, "consumed_samples": 8, "ms_per_iteration": 1.0, "tokens_per_second": 5.0}
    lines = [json.dumps(good).encode(), b'{"iteration": 4, "lm_loss": "\xff"}', NESTED.encode(), b'{"iteration": 5']
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join(lines))
    assert read_records(tmp_path / "metrics.jsonl") == [good]
    more = [{**good, "iteration": 1}, {"iteration": 6}, {**good, "lm_loss": "x"}, {**good, "lm_loss": 1e300}]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in [good, *more]))
    (tmp_path / "history.jsonl").write_text('{"iteration": 1}\n{"iteration": 2, "text": "finished"}\n')
    (tmp_path / "samples.jsonl").write_text('{"iteration": 1}\n')
    assert "finished" in render_page(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        "{",
        NESTED,
        '{"config": {"parallel": {"x": 1}}}',
        '{"config": {"train": 7}}',
        '{"config": {"train": {"train_iters": "9"}}}',
        '{"environment": 7}',
        '{"train_iters": []}',
        '{"config": {"%s": 1}}' % ("x" * 9000),
    ],
)
def test_a_page_of_a_run_whose_settings_are_damaged(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with assert_refused(r"config\.json: ") as caught:
        render_page(tmp_path)
    assert_short(caught)
    with assert_refused(r"--config ") as caught:
        read_config(str(tmp_path / "config.json"))
    assert_short(caught)


def test_settings_without_a_folder(tmp_path: Path) -> None:
    write_config(tmp_path, Config(), {"global_batch_size": 8}, continues=False)
    assert read_config(str(tmp_path / "config.json")) == {"train.global_batch_size": 8}
