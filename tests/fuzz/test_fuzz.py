"""Few inputs of every target, always the same ones, and those that have shown a defect."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.fuzz import target
from tests.fuzz.running import try_inputs
from tests.fuzz.target import Input, Target
from tests.fuzz.targets import TARGETS

# Inputs of each target, from seed 0; all together take some seconds. Those with whole models take longest.
INPUTS, OF_MODELS = 40, 8
MODELS = (
    "nanoGPT",
    "Megatron, flat",
    "Megatron v2, legacy .pt",
    "Megatron Core",
    "Hugging Face: safetensors",
    "torch_dist",
    "torch_dist: .metadata",
    "DCP",
    "DCP: .metadata",
)
# Seeds at which a defect was found once: they are tried again.
FOUND: dict[str, tuple[int, ...]] = {
    "pair's manifest behind its seal": (9, 108, 123, 147, 201, 205, 4552),
    "DeepSpeed's file": (1580, 4009, 6591, 7120),
    "Hugging Face: index": (6062,),
    "named corpora": (11202,),
    "vocabulary and merges": (131,),
    "builtin_bpe.json": (120,),
    "tokenizer of a checkpoint": (103,),
    "SentencePiece model": (109,),
    "records of a run": (13, 54, 165, 228, 392, 20900),
    "config.json": (75, 126, 6033, 7330),
    "config.json of a report": (9, 14, 86, 107, 132, 167),
}


@pytest.mark.parametrize("name", TARGETS)
def test_inputs_are_taken_or_refused(tmp_path: Path, name: str) -> None:
    given = Input(TARGETS[name], tmp_path / "input")
    outcomes = {
        seed: given.attempt(seed) for seed in (*range(OF_MODELS if name in MODELS else INPUTS), *FOUND.get(name, ()))
    }
    findings = {seed: outcome for seed, outcome in outcomes.items() if outcome[0] not in ("taken", "refused")}
    assert not findings
    assert len({given.changed(seed)[file] for seed in outcomes for file in given.changed(seed)}) > len(outcomes) // 3


def bad_reader(name: str) -> Target:
    """A reader with a defect, of a file of ten bytes, at every fourth seed or so; a worker process calls this."""
    kept: list[bytes] = []

    def read(folder: Path) -> None:
        data = (folder / "x").read_bytes()
        if data == b"0123456789":
            return
        if name == "crash" and len(data) < 10:
            os.kill(os.getpid(), signal.SIGSEGV)
        elif name == "hang" and len(data) < 10:
            time.sleep(3600)
        elif name == "exception":
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
        monkeypatch.setattr(target, "MOST_SECONDS", 0.05)
    given = Input(bad_reader(name), tmp_path / "input")
    found = {given.attempt(seed)[0].partition(":")[0] for seed in range(3 if name in ("slow", "memory") else 30)}
    assert name in found


def test_a_reader_that_ends_or_stops_its_process_is_found() -> None:
    """And the inputs behind it are tried all the same."""
    tried = try_inputs(bad_reader, "crash", 0, 8)
    assert tried.findings.keys() == {"crash: SIGSEGV"} and tried.next == 8
    crashes = tried.findings["crash: SIGSEGV"]["count"]
    assert 1 < crashes < 8 and tried.taken == 8 - crashes
    seed = tried.findings["crash: SIGSEGV"]["seeds"][0]
    tried = try_inputs(bad_reader, "hang", seed, 1, silence=1.0)
    assert tried.findings == {"hang: nothing for 1 s": {"count": 1, "seeds": [seed], "example": ""}}
    assert tried.next == seed + 1
