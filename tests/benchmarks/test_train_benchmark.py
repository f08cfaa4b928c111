"""The training benchmark runs end to end on a tiny model, its gates can fail, and time that is short is kept to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import report
from benchmarks.problem import Arm
from benchmarks.train import visit_all
from benchmarks.training_report import close_to, goals, summarise

ROOT = Path(__file__).resolve().parents[2]

# A model of nanoGPT's interface and parameter names whose MLP is another: its GELU is the tanh form.
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


def run(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "train.py"), "--smoke", "--output", str(folder), *flags],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )


@pytest.mark.slow
def test_a_smoke_run_ends_with_a_table_and_json(tmp_path: Path):
    pytest.importorskip("transformers")
    done = run(tmp_path, "--preset", "cpu", "--arms", "ours eager,HF eager")
    assert done.returncode == 0, done.stdout + done.stderr
    text = (tmp_path / "train_cpu.json").read_text()
    result = json.loads(text)
    assert max(result["gate"]["huggingface"].values()) < 1e-5
    assert result["ceiling"]["flops_per_s"] > 0
    for name, orders in (("ours eager", [0, 3]), ("HF eager", [1, 2])):  # mirrored
        entry = result["arms"][name]
        assert [visit["order"] for visit in entry["visits"]] == orders
        assert entry["gate"].startswith("agrees")
        assert entry["summary"]["step_s"]["n"] == 4 and len(entry["visits"][0]["step_s"]) == 2
        assert entry["visits"][0]["last_loss"] < entry["visits"][0]["loss"], "it did not learn"
        assert any(line.startswith(name) for line in done.stdout.splitlines())
    assert str(tmp_path) not in text and str(ROOT) not in text
    assert {"machine", "versions", "commit", "date"} <= result.keys()


@pytest.mark.wide
def test_a_peer_that_computes_something_else_fails_the_gate(tmp_path: Path):
    (tmp_path / "model.py").write_text(WRONG_MODEL)
    done = run(tmp_path, "--preset", "cpu", "--nanogpt", str(tmp_path), "--arms", "nanoGPT eager")
    assert done.returncode == 1
    assert "THE GATE FAILED" in done.stdout
    result = json.loads((tmp_path / "train_cpu.json").read_text())
    assert result["gate"]["nanogpt"]["gradient"] > 1e-4  # the tanh form alone: all else agrees
    assert result["arms"]["nanoGPT eager"]["visits"] == [], "timed although the gate failed"


@pytest.mark.slow
def test_blocks_agree_and_are_compared(tmp_path: Path):
    done = run(tmp_path, "--preset", "blocks")
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "blocks.json").read_text())
    assert max(result["gate"]["fp32"].values()) < 1e-5 and max(result["gate"]["bf16"].values()) < 2e-2
    assert all(len(times) == 3 for arms in result["seconds"].values() for times in arms.values())
    assert {(r["speed_of"], r["over"]) for r in result["ratios"]} >= {("ours, mp 2", "DTensor, mp 2")}


def visit(seconds: float = 0.5, loss: float = 10.0) -> dict[str, Any]:
    return {
        "step_s": [seconds] * 3,
        "first_step_s": 1.0,
        "loss": loss,
        "grad_norm": 2.0,
        "padding_nats": 0.0,
        "tokens_per_step": 100,
        "flops_per_token": 10,
        "flops_per_token_llm_c": 8,
        "expected_peak_bytes": None,
        "memory_bytes": {"peak_resident": 10**9},
        "computes": "",
    }


def entries(arms: list[Arm]) -> dict[str, Any]:
    return {
        "arms": {
            arm.name: {
                "kind": arm.kind,
                "compiled": arm.compiled,
                "precision": arm.precision,
                "changes": arm.changes,
                "visits": [],
            }
            for arm in arms
        }
    }


FOUR = [
    Arm("ours eager", "ours"),
    Arm("HF eager", "huggingface"),
    Arm("nanoGPT as shipped", "nanogpt", shipped=True),
    Arm("nanoGPT eager", "nanogpt"),
]


def test_a_failing_arm_spoils_no_other(tmp_path: Path):
    result = entries(FOUR)
    bad = visit_all(
        FOUR,
        result,
        tmp_path / "x.json",
        1,
        lambda: 1e9,
        lambda arm: {"failed": "why"} if arm.name == "HF eager" else visit(),
    )
    assert bad == ["HF eager"]
    assert [len(entry["visits"]) for entry in result["arms"].values()] == [2, 1, 2, 2]
    assert json.loads((tmp_path / "x.json").read_text()) == result


def test_a_wrong_loss_fails_the_gate(tmp_path: Path):
    result = entries(FOUR)
    bad = visit_all(
        FOUR,
        result,
        tmp_path / "x.json",
        1,
        lambda: 1e9,
        lambda arm: visit(loss=10.02 if arm.name == "nanoGPT eager" else 10.0),
    )
    assert set(bad) == {"nanoGPT eager"}
    assert close_to(result, FOUR[3]).startswith("FAILED")


def test_second_visits_are_dropped_when_the_time_is_short(tmp_path: Path):
    result, clock = entries(FOUR), [0.0]

    def measure(arm: Arm) -> dict[str, Any]:
        clock[0] += 100
        return visit()

    class Monotonic:
        @staticmethod
        def monotonic() -> float:
            return clock[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("benchmarks.train.time", Monotonic)
        visit_all(FOUR, result, tmp_path / "x.json", 1, lambda: 630 - clock[0], measure)
    assert [len(entry["visits"]) for entry in result["arms"].values()] == [2, 2, 1, 1], "the first arms count most"


def test_visits_of_an_earlier_call_are_not_repeated(tmp_path: Path):
    result, order = entries(FOUR), []

    def measure(arm: Arm) -> dict[str, Any]:
        order.append(arm.name)
        return visit()

    result["arms"]["ours eager"]["visits"] = [visit(), visit()]
    result["arms"]["HF eager"]["visits"] = [visit()]
    visit_all(FOUR, result, tmp_path / "x.json", 1, lambda: 1e9, measure)
    assert order == ["nanoGPT as shipped", "nanoGPT eager", "nanoGPT eager", "nanoGPT as shipped", "HF eager"]


def test_summary_and_goals():
    result = entries(FOUR)
    for arm, seconds in zip(FOUR, (0.5, 1.0, 2.0, 0.6), strict=True):
        result["arms"][arm.name]["visits"] = [visit(seconds)]
    result["ceiling"] = {"flops_per_s": 4000.0}
    summarise(result)
    assert result["arms"]["ours eager"]["summary"]["mfu"] == pytest.approx(0.5)
    assert result["arms"]["ours eager"]["summary"]["mfu_by_llm_c"] == pytest.approx(0.4)
    (shipped, missed) = goals(result, [("nanoGPT as shipped", 3.0), ("Hugging Face, its faster", 2.5)])
    assert shipped["ratio"] == pytest.approx(4.0) and shipped["met"]
    assert missed["ratio"] == pytest.approx(2.0) and not missed["met"]


def test_report_keeps_no_paths_and_lines_up():
    assert (
        report.without_paths("File '/home/a/b.py', at /x/y/z: 3/4 of https://pytorch.org/a/b")
        == "File 'b.py', at z: 3/4 of https://pytorch.org/a/b"
    )
    lines = report.table(["arm", "tokens/s"], [["ours", "1,000"], ["another", "9"]]).splitlines()
    assert len({len(line) for line in lines}) == 1
    spread = report.spread([1.0, 2.0, 3.0, 4.0, 5.0])
    assert [spread[key] for key in ("p10", "median", "p90")] == pytest.approx([1.4, 3.0, 4.6])
