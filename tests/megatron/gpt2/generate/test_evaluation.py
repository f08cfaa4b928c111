"""Test that scores in every layout equal a separate computation with transformers on the exported model."""

from __future__ import annotations

import json
import math
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import mpu
from data_utils.corpora.detokenizers import ptb_detokenizer, wikitext_detokenizer
from megatron.gpt2.generate.evaluation import evaluate_task, guess_task, read_task
from megatron.gpt2.generate.load_model import load_for_inference
from tests.conftest import ROOT, tool
from tests.distributed import run_ranks
from tests.fork_server import WarmPython
from tests.megatron.gpt2.generate.word_model import LENGTH, SHAPE, word_model

main = tool("evaluate_gpt2").main
PROSE = (ROOT / "LICENSE").read_text()


@pytest.fixture(scope="module")
def folder(shared_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with a model, a text in WikiText's format, and passages of this text and of the training text."""
    folder = tmp_path_factory.mktemp("word_model")
    words = word_model(shared_folder, folder)
    wiki = re.sub(r"(?<=\w)-(?=\w)", " @-@ ", re.sub(r"([.,;:()\"])", r" \1 ", PROSE)).replace("\n", " \n ")
    (folder / "wiki.test.tokens").write_text(wiki)
    passages = [" ".join(words[start : start + 9]) for start in range(0, 600, 10)]
    passages += [passage for passage in PROSE.split("\n\n") if passage.strip()][:20]
    passages += ["Alone", " trailing space \n"]
    (folder / "lambada.jsonl").write_text("".join(json.dumps({"text": passage}) + "\n" for passage in passages))
    (folder / "some.jsonl").write_text(
        "".join(json.dumps({"text": " ".join(words[start : start + 70])}) + "\n" for start in range(0, 1000, 100))
    )
    return folder


class Reference:
    """Computes scores with transformers, one sequence at a time."""

    def __init__(self, exported: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(exported)

    def ids(self, text: str) -> list[int]:
        return self.tokenizer(text)["input_ids"]

    @torch.no_grad()
    def log_probabilities(self, ids: list[int]) -> torch.Tensor:
        """Return the log-probabilities of the token after each id, [len(ids), v]."""
        return self.model(torch.tensor([ids])).logits[0].double().log_softmax(-1)

    def nats(self, ids: list[int], stride: int) -> float:
        """Return the nats of all ids except the first one, in windows that begin every `stride` ids."""
        scores: dict[int, float] = {}  # {position: nats}; only the first window with an id scores it
        for start in range(0, len(ids), stride):
            table = self.log_probabilities(ids[start : start + LENGTH])
            for at, of_next in zip(range(start + 1, len(ids)), table, strict=False):
                scores.setdefault(at, -float(of_next[ids[at]]))
        return sum(scores.values())

    def accuracy(self, passages: list[str], strict: bool) -> float:
        hits = 0
        for passage in passages:
            word = passage.split()[-1]
            context, target = (passage.rstrip()[: -len(word)].strip(), " " + word) if strict else (passage, "")
            ids = [*self.ids(context), *self.ids(target)]
            count = len(self.ids(target)) or 1
            ids = [*([self.tokenizer.eos_token_id] * (len(ids) == count)), *ids][-LENGTH - 1 :]
            hits += self.log_probabilities(ids[:-1]).argmax(-1).tolist()[-count:] == ids[-count:]
        return hits / len(passages)


def evaluated(rank: int, world_size: int, folder: Path, model_parallel_size: int) -> list[dict[str, Any]]:
    mpu.initialize_model_parallel(model_parallel_size)
    try:
        loaded = load_for_inference(folder / "save", torch.device("cpu"), torch.float32, log=print)
        model, tokenizer = loaded.model, loaded.tokenizer
        return [
            evaluate_task(
                model,
                read_task(name, f"{folder}/{file}", tokenizer, length=LENGTH, log=print, **how),
                tokenizer,
                batch_size=4,
            )
            for name, file, how in (
                ("WIKITEXT103", "wiki.test.tokens", {"overlapping_eval": 8}),
                ("WIKITEXT103", "wiki.test.tokens", {}),
                ("LAMBADA", "lambada.jsonl", {}),
                ("LAMBADA", "lambada.jsonl", {"strict_lambada": True}),
                ("TEXT", "some.jsonl", {}),
            )
        ]
    finally:
        mpu.destroy_model_parallel()


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[dict[str, Any]]:
    return evaluated(0, 1, folder, 1)


def test_scores_equal_transformers(folder: Path, alone: list[dict[str, Any]]) -> None:
    reference = Reference(folder / "exported")
    raw = (folder / "wiki.test.tokens").read_text()
    ids, words = reference.ids(wikitext_detokenizer(raw)), len(raw.strip().split(" "))
    assert "@-@" in raw
    for metrics, stride in ((alone[0], 8), (alone[1], LENGTH)):
        nats = reference.nats(ids, stride)
        assert (metrics["tokens"], metrics["words"]) == (len(ids) - 1, words)
        assert metrics["perplexity"] == pytest.approx(math.exp(nats / (len(ids) - 1)), rel=1e-5)
        assert metrics["loss"] * metrics["token_ratio"] == pytest.approx(nats / (words - 1), abs=1e-5)
        assert metrics["adjusted_perplexity"] == pytest.approx(math.exp(nats / (words - 1)), rel=1e-4)

    passages, texts = (
        [json.loads(line)["text"] for line in (folder / name).read_text().splitlines()]
        for name in ("lambada.jsonl", "some.jsonl")
    )
    for metrics, strict in ((alone[2], False), (alone[3], True)):
        assert metrics["accuracy"] == reference.accuracy(passages, strict)
        assert 0.05 < metrics["accuracy"] < 0.95, "neither is all right nor all wrong"
        assert metrics["examples"] == len(passages) and metrics["examples_cut"] > 0
    assert alone[2]["accuracy"] > alone[3]["accuracy"]

    nats = sum(reference.nats([reference.tokenizer.eos_token_id, *reference.ids(text)], LENGTH) for text in texts)
    lengths, metrics = [len(reference.ids(text)) for text in texts], alone[4]
    assert max(lengths) > LENGTH
    assert (metrics["tokens"], metrics["bytes"]) == (sum(lengths), sum(len(text.encode()) for text in texts))
    assert metrics["bits_per_byte"] == pytest.approx(nats / math.log(2) / metrics["bytes"], rel=1e-5)


@pytest.mark.parametrize("model_parallel_size", [pytest.param(1, marks=pytest.mark.wide), 2])
def test_every_layout(folder: Path, alone: list[dict[str, Any]], model_parallel_size: int) -> None:
    first, second = run_ranks(evaluated, 2, folder, model_parallel_size)
    assert first == second
    if model_parallel_size == 1:
        assert first == alone, "data-parallel: to the last bit"
    else:
        assert all(one == pytest.approx(other, rel=1e-5) for one, other in zip(first, alone, strict=True))


def test_program(
    python: WarmPython, folder: Path, tmp_path: Path, alone: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Run Megatron's command line of 2019 for WikiText, on two ranks."""
    unused = "--log-interval 10 --no-load-optim --no-load-rng --checkpoint-activations --cache-dir cache"
    shape = ["--device", "cpu", *SHAPE, *unused.split()]
    line = (
        f"-m torch.distributed.run --nproc-per-node 2 tools/evaluate_gpt2.py --load {folder}/save --batch-size 4 "
        f"--valid-data {folder}/wiki.test.tokens --overlapping-eval 8 --model-parallel-size 2 --output "
        f"{tmp_path}/result.json"
    )
    done = subprocess.run([python.python, *line.split(), *shape], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "--num-layers" in done.stderr and "not needed" in done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    (scored,) = result["results"]
    assert scored["task"] == "WIKITEXT103" and scored["warning"], "the model is as bad as an untrained one on this text"
    assert scored["metrics"] == pytest.approx(alone[0], rel=1e-5)
    assert f"{scored['metrics']['adjusted_perplexity']:,.6f}" in done.stdout

    assert main(["--load", str(folder / "save"), "--valid-data", str(folder / "some.jsonl"), "--device", "cpu"]) == 0
    out, error = capsys.readouterr()
    assert f"{alone[4]['bits_per_byte']:,.6f}" in out
    assert error == f"{folder / 'some.jsonl'}: the text is the field 'text' (--text-key)\n"


@pytest.mark.parametrize(
    "flags, said",
    {
        "--valid-data missing.txt": "--valid-data: no such file: missing.txt",
        "--valid-data builtin": "--valid-data builtin",
        "--num-layers 3": "--num-layers: here 3, checkpoint 2",
        "--seq-length 33": "--seq-length 33",
        "--overlapping-eval 33": "--overlapping-eval 33",
        "--task LAMBADA": "JSON lines",
        "--load-openai": "--load-openai",
        "--model-parallel-size 2": "--tensor-model-parallel-size 2",
        "--output no/such/folder/result.json": "--output",
    }.items(),
)
def test_bad_input(folder: Path, capsys: pytest.CaptureFixture[str], flags: str, said: str) -> None:
    line = f"--load {folder}/save --valid-data {folder}/wiki.test.tokens --device cpu"
    assert main([*line.split(), *flags.split()]) == 2
    out, error = capsys.readouterr()
    assert not out and error.splitlines()[-1].startswith("error: ") and said in error.splitlines()[-1]


def test_detokenizers() -> None:
    assert wikitext_detokenizer(
        ' \n = Robert <unk> = \n \n He had a guest @-@ starring role , in " Teddy \'s Story " ( 1 @,@ 000 @.@ 5 ) . \n'
        " = = Career = = \n"
    ) == ('\n= Robert <unk> =\n\nHe had a guest-starring role, in "Teddy\'s Story" (1,000.5).\n== Career ==\n')
    assert ptb_detokenizer("he does n't earn $ N a year \n the firm 's") == "he doesn't earn $1 a year\nthe firm's"


@pytest.mark.parametrize(
    "path, task",
    {
        "data/wikitext-2/test.txt": "WIKITEXT103",
        "wiki.test.tokens": "WIKITEXT103",
        "ptb/ptb.test.txt": "PTB",
        "lambada_test.jsonl": "LAMBADA",
        "wikitext.jsonl": "TEXT",
        "wikipedia.txt": "TEXT",
        "/home/ptb/runs/my.txt": "TEXT",
    }.items(),
)
def test_guess_task(path: str, task: str) -> None:
    assert guess_task(path) == task
