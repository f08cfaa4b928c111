"""Run each benchmark as a command with small sizes. A model with different outputs is not timed. The modelled step
times stay close to measured rows and published tables."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron.gpt2.extensions.plan.cluster import read_cluster

ROOT = Path(__file__).resolve().parents[2]

# A model with nanoGPT's interface and parameter names, but with the tanh form of GELU in its MLP.
WRONG_MODEL = """
from dataclasses import dataclass
import torch
from torch import nn
from torch.nn import functional as F

@dataclass
class GPTConfig:
    block_size: int
    vocab_size: int
    n_layer: int
    n_head: int
    n_embd: int
    dropout: float
    bias: bool

class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.n = c.n_head
        self.c_attn, self.c_proj = nn.Linear(c.n_embd, 3 * c.n_embd), nn.Linear(c.n_embd, c.n_embd)

    def forward(self, x):
        b, s, h = x.shape
        q, k, v = self.c_attn(x).view(b, s, 3, self.n, -1).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(b, s, h))

class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(c.n_embd, 4 * c.n_embd), nn.Linear(4 * c.n_embd, c.n_embd)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))

class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(c.n_embd), nn.LayerNorm(c.n_embd)
        self.attn, self.mlp = Attention(c), MLP(c)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))

class GPT(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.transformer = nn.ModuleDict(dict(
            wte=nn.Embedding(c.vocab_size, c.n_embd), wpe=nn.Embedding(c.block_size, c.n_embd),
            h=nn.ModuleList(Block(c) for _ in range(c.n_layer)), ln_f=nn.LayerNorm(c.n_embd)))

    def forward(self, tokens, labels):
        t = self.transformer
        x = t.wte(tokens) + t.wpe.weight[:tokens.size(1)]
        for block in t.h:
            x = block(x)
        logits = F.linear(t.ln_f(x), t.wte.weight)
        return logits, F.cross_entropy(logits.flatten(0, 1), labels.flatten())
"""


def run(folder: Path, command: str, timeout: float = 300) -> tuple[int, str, dict[str, Any]]:
    """Run a smoke run. Return its exit code, output and JSON."""
    name, *words = shlex.split(command)
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / name, *words, "--smoke", "--output", folder],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )
    written = list(folder.glob("*.json"))
    return done.returncode, done.stdout, json.loads(written[0].read_text()) if written else {}


def training_agrees(result: dict[str, Any]) -> None:
    assert max(result["gate"]["huggingface"].values()) < 1e-5
    for name, orders in (("ours eager", [0, 3]), ("HF eager", [1, 2])):  # The order of the runs is ours, HF, HF, ours.
        entry = result["arms"][name]
        assert [visit["order"] for visit in entry["visits"]] == orders and entry["gate"].startswith("agrees")
        assert entry["visits"][0]["last_loss"] < entry["visits"][0]["loss"], "the model did not learn"


def texts_are_equal(result: dict[str, Any]) -> None:
    assert [row["equal_texts"] for row in result["speed"][2:]] == ["8 of 8", "1 of 1"]  # In fp32, the texts are equal.
    assert all(row["ratio"] > 0 for row in result["speed"] + result["by_position"])


def first_minutes_are_complete(result: dict[str, Any]) -> None:
    cases = {name: stage["cases"] for name, stage in result["stages"].items()}
    assert list(cases) == "machine expandable modes tests steps kernels tables".split()
    assert len(cases["modes"]) == 4 and not any(mode["waits"] for mode in cases["modes"].values())
    assert all(kernels["parts_ms"]["attention"] > 0 for kernels in cases["kernels"].values())
    assert cases["steps"]["345M"]["tokens_per_s"] > 0


SMOKE: dict[str, Callable[[dict[str, Any]], object]] = {
    "train.py --preset cpu --arms 'ours eager,HF eager'": training_agrees,
    "generation.py --rounds 1": texts_are_equal,
    "gpu_first_minutes.py": first_minutes_are_complete,
    "checkpoint.py": lambda result: min(result["ratios"].values()) > 0 or pytest.fail("no ratio"),
    "data.py --only loading": lambda result: result["loading"]["times_nanogpt"] > 1 or pytest.fail("slower"),
    "memory.py": lambda result: 0.9 < result["runs"][0]["ratio"] < 1.1 or pytest.fail(f"{result}"),
    # The tolerance is wide, because the planner is less exact for whole processes of a small model.
    "memory.py --stages": lambda result: (
        all(0.8 < stage["ratio"] < 1.25 for stage in result["runs"][0]["stages"]) or pytest.fail(f"{result}")
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("command", SMOKE)
def test_smoke(tmp_path: Path, command: str, test_data: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GPT2_VOCAB", str(test_data / "gpt2"))
    code, output, result = run(tmp_path, command)
    assert code == 0, output
    SMOKE[command](result)
    text = json.dumps(result)
    assert str(tmp_path) not in text and str(ROOT) not in text


@pytest.mark.wide
def test_a_different_peer_is_not_timed(tmp_path: Path):
    (tmp_path / "model.py").write_text(WRONG_MODEL)
    code, output, result = run(tmp_path, f"train.py --preset cpu --nanogpt {tmp_path} --arms 'nanoGPT eager'")
    assert code == 1 and "THE GATE FAILED" in output
    assert result["gate"]["nanogpt"]["gradient"] > 1e-4  # WRONG_MODEL has a different GELU.
    assert result["arms"]["nanoGPT eager"]["visits"] == [], "timed although the gate failed"


@pytest.mark.slow
def test_recorded_cases_are_not_measured_again(tmp_path: Path):
    command = "gpu_first_minutes.py --stages machine"
    before = run(tmp_path, command)[2]["stages"]["machine"]["cases"]
    _, output, result = run(tmp_path, command)
    assert "machine: already measured" in output and result["stages"]["machine"]["cases"] == before


def step_times(*words: str | Path) -> Any:
    line = [sys.executable, ROOT / "benchmarks" / "step_times.py", *words, "--json"]
    return json.loads(subprocess.run(line, capture_output=True, timeout=120).stdout)


def test_errors_on_measured_rows_stay_within_their_limits(test_data: Path):
    """The limits are a little above the current errors."""
    for name, mean, median in (("a100_one_node", 0.012, 0.01), ("a100_many_nodes", 0.09, 0.07)):
        found = step_times(test_data / "step-times" / f"{name}.csv")
        assert found["rows"] > 70
        assert found["mean_absolute_relative_error"] < mean
        assert found["percentiles"]["50"] < median
        assert 0.7 < found["interval"]["share_inside"] < 0.9
        assert found["first_choice"]["share_within_5_percent"] == 1


def test_published_tables_are_met_with_the_same_constants_of_the_gpu() -> None:
    a100, selene = read_cluster("a100")[0], read_cluster("selene")[0]
    assert replace(selene, network=a100.network, network_send=a100.network_send) == a100
    tables = step_times("--published")
    assert sum(map(len, tables.values())) == 26
    for title, rows in tables.items():
        assert max(abs(row["error"]) for row in rows) < (0.03 if "2020" in title else 0.06), title
