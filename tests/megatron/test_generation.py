"""Generation: what is drawn, from which ids, the same on every rank; and the program around it."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import mpu
from data_utils import build_tokenizer
from megatron.checkpointing import model_pieces, write_checkpoint
from megatron.config import ModelConfig
from megatron.generation import draw, generate, load_for_inference
from megatron.model.gpt2 import GPT2Model
from tests.distributed import run_ranks

REPOSITORY = Path(__file__).parents[2]
TOKENIZER = build_tokenizer("bytes")
CONFIG = ModelConfig(num_layers=2, hidden_size=32, num_attention_heads=4, max_position_embeddings=16,
                     vocab_size=TOKENIZER.vocab_size, init_method_std=0.2)


def texts(rank: int = 0, world_size: int = 1) -> list[list[int]]:
    """Greedy and drawn, past the last position, with dropout off although the model was training."""
    mpu.initialize_model_parallel(world_size)
    try:
        torch.manual_seed(rank)  # ranks that drew for themselves would differ
        model = GPT2Model(CONFIG).train()
        made = [generate(model, TOKENIZER, prompt, max_new_tokens=24, temperature=temperature, top_k=top_k,
                         generator=torch.Generator().manual_seed(rank))
                for prompt in ([], list(b"Once")) for temperature, top_k in ((0.0, 0), (1.0, 1), (1.0, 0), (0.7, 5))]
        assert model.training
        return made
    finally:
        mpu.destroy_model_parallel()


def test_one_rank_and_two() -> None:
    alone = texts()
    assert alone[0] == alone[1], "the likeliest of one is the likeliest"
    assert alone[0] != alone[2]
    assert any(len(text) == 24 for text in alone)
    assert all(0 <= i < TOKENIZER.vocab_size for text in alone for i in text)
    assert run_ranks(texts, 2) == [alone, alone]


def test_draw() -> None:
    logits, generator = torch.tensor([0.0, 3.0, 1.0, 2.0]), torch.Generator().manual_seed(0)
    assert draw(logits, 0.0, 0, None).tolist() == [1]
    drawn = [int(draw(logits, 2.0, 2, generator)) for _ in range(200)]
    assert set(drawn) == {1, 3}
    assert len({int(draw(logits, 2.0, 0, generator)) for _ in range(200)}) == 4
    assert abs(drawn.count(1) / 200 - 1 / (1 + 2.718281828 ** -0.5)) < 0.12


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    mpu.initialize_model_parallel(1)
    model = GPT2Model(CONFIG)
    pieces = model_pieces(model.named_parameters(), mpu.partition_specs(model), mp_rank=0, mp_size=1)
    mpu.destroy_model_parallel()
    write_checkpoint(folder, 3, facts={"config": {"model": dataclasses.asdict(CONFIG)},
                                       "vocab_size": TOKENIZER.vocab_size,
                                       "tokenizer": {"fingerprint": TOKENIZER.fingerprint}},
                     files={"mp_rank_00/model.safetensors": pieces}, rank=0, world_size=1, attempt="a", timeout_s=1)
    TOKENIZER.save(folder / "tokenizer")
    return folder


def test_what_was_trained_is_what_is_loaded(saved: Path) -> None:
    mpu.initialize_model_parallel(1)
    try:
        model, tokenizer, _ = load_for_inference(saved, torch.device("cpu"), torch.float32, log=pytest.fail)
        assert tokenizer.fingerprint == TOKENIZER.fingerprint
        expected = GPT2Model(CONFIG).state_dict()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
    finally:
        mpu.destroy_model_parallel()


def run_program(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "tools/generate_text.py", "--device", "cpu", "--precision", "fp32", *flags],
                          cwd=REPOSITORY, capture_output=True, text=True, timeout=60)


def test_program(saved: Path, tmp_path: Path) -> None:
    done = run_program("--load", str(saved), "--prompt", "Once", "--max-new-tokens", "5", "--seed", "1")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Once")
    done = run_program("--load", str(tmp_path))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done
    assert str(tmp_path) in done.stderr
