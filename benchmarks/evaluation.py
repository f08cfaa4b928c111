#!/usr/bin/env python3
"""Scores on the whole of WikiText-2's test split and of LAMBADA beside an independent computation: `transformers` on
the exported model, one window at a time, with lm-eval's detokenizer. At each layout; the files in DIR are named below.

    python benchmarks/evaluation.py --data DIR    # 10 minutes on 2 cores; needs the extra [eval]

The model is small and has seen the ends of LAMBADA's passages, so that it gets some of them right: its scores say
nothing but whether they are computed well.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works in a clone that is not installed

import torch

from benchmarks import report
from data_utils import load_tokenizer
from megatron.gpt2.checkpoint.reader import Checkpoint
from megatron.gpt2.commands.pretrain_gpt2 import main as pretrain
from megatron.gpt2.formats.write_huggingface import write_huggingface

WIKITEXT, LAMBADA, OTHER = "wikitext-2/test.txt", "lambada/lambada_test.jsonl", "wikitext-2/valid.txt"
POSITIONS, STRIDE = 128, 32  # the second is Megatron's --overlapping-eval
SHAPE = [
    "--num-layers",
    "2",
    "--hidden-size",
    "64",
    "--num-attention-heads",
    "4",
    "--seq-length",
    str(POSITIONS),
    "--max-position-embeddings",
    str(POSITIONS),
    "--attention-dropout",
    "0",
    "--hidden-dropout",
    "0",
]
LAYOUTS = ((1, 1), (1, 2), (2, 1))  # model-parallel, data-parallel
GOAL = 1e-4  # of a perplexity, relative; accuracies are equal
Scores = dict[str, float]


def train(vocabulary: Path, folder: Path, lambada: Path, other: Path, iterations: int) -> None:
    """A model into save/, its export into exported/."""
    ends = [" ".join(json.loads(line)["text"].split()[-6:]) for line in lambada.read_text("utf-8").splitlines()]
    draw = random.Random(0)  # each time after other text, for so they are met in their passages
    texts = [other.read_text("utf-8"), *(" ".join(draw.sample(ends, len(ends))) for _ in range(24))]
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), "utf-8")
    assert (
        pretrain(
            [
                "--train-data",
                f"{folder}/text.jsonl",
                "--save",
                f"{folder}/save",
                *SHAPE,
                "--lr",
                "1e-2",
                "--tokenizer-type",
                "GPT2BPETokenizer",
                "--vocab-file",
                f"{vocabulary}/encoder.json",
                "--merge-file",
                f"{vocabulary}/vocab.bpe",
                "--micro-batch-size",
                "16",
                "--train-iters",
                str(iterations),
                "--split",
                "1,0,0",
                "--eval-iters",
                "0",
                "--device",
                "cpu",
                "--data-cache-path",
                f"{folder}/cache",
            ]
        )
        == 0
    )
    write_huggingface(
        Checkpoint(folder / "save" / f"iter_{iterations:07d}"),
        folder / "exported",
        tokenizer=load_tokenizer(folder / "save" / "tokenizer"),
        log=print,
    )


def ours(folder: Path, wikitext: Path, lambada: Path, model_parallel: int, data_parallel: int) -> Scores:
    """By the program."""
    metrics, ranks = [], model_parallel * data_parallel
    runs: tuple[list[str | Path], ...] = ([wikitext, lambada], [lambada, "--strict-lambada"])
    for number, flags in enumerate(runs):
        out = folder / f"{model_parallel}_{data_parallel}_{number}.json"
        subprocess.run(
            [
                sys.executable,
                report.ROOT / "tools" / "evaluate_gpt2.py",
                "--nproc-per-node",
                str(ranks),
                "--load",
                folder / "save",
                "--device",
                "cpu",
                "--model-parallel-size",
                str(model_parallel),
                "--output",
                out,
                "--valid-data",
                *flags,
            ],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        metrics += [result["metrics"] for result in json.loads(out.read_text())["results"]]
    wiki, plain, strict = metrics
    return {
        "perplexity": wiki["perplexity"],
        "adjusted_perplexity": wiki["adjusted_perplexity"],
        "lambada": plain["accuracy"],
        "lambada_strict": strict["accuracy"],
    }


@torch.no_grad()
def theirs(folder: Path, wikitext: Path, lambada: Path) -> Scores:
    from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder / "exported", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "exported")

    def ids(text: str) -> list[int]:
        return list(tokenizer(text, verbose=False)["input_ids"])

    def logits(context: list[int], last: int) -> Any:
        return model(torch.tensor([context]), logits_to_keep=last).logits[0]

    raw = wikitext.read_text("utf-8")
    tokens, words = ids(wikitext_detokenizer({"page": raw})), len(raw.strip().split(" "))
    nats, end = 0.0, 1  # tokens[:end] have been scored
    for start in range(0, len(tokens), STRIDE):
        targets = tokens[end : start + POSITIONS + 1]
        if not targets:
            break
        window = tokens[start : end + len(targets) - 1]
        nats += float(
            torch.nn.functional.cross_entropy(
                logits(window, len(targets)).double(), torch.tensor(targets), reduction="sum"
            )
        )
        end += len(targets)

    hits = {False: 0, True: 0}
    passages = [json.loads(line)["text"] for line in lambada.read_text("utf-8").splitlines()]
    for passage in passages:
        beginning, word = passage.rsplit(None, 1)
        for strict in hits:
            target = ids(" " + word) if strict else ids(passage)[-1:]
            context = ids(beginning.strip()) if strict else ids(passage)[:-1]
            window = (context + target)[-POSITIONS - 1 : -1]
            hits[strict] += logits(window, len(target)).argmax(-1).tolist() == target
    return {
        "perplexity": math.exp(nats / (len(tokens) - 1)),
        "adjusted_perplexity": math.exp(nats / (words - 1)),
        "lambada": hits[False] / len(passages),
        "lambada_strict": hits[True] / len(passages),
    }


def beginnings(data: Path, folder: Path, lines: int) -> Path:
    """A folder with the first lines of each file."""
    for name in (WIKITEXT, LAMBADA, OTHER):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        with open(data / name, encoding="utf-8") as file:
            (folder / name).write_text("".join(itertools.islice(file, lines)), "utf-8")
    return folder


def agrees(scores: Scores, expected: Scores) -> bool:
    return all(
        math.isclose(value, expected[name], rel_tol=GOAL) if "perplexity" in name else value == expected[name]
        for name, value in scores.items()
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data",
        type=Path,
        required=True,
        metavar="DIR",
        help=f"the folder of {WIKITEXT}, {OTHER}, {LAMBADA}, and of gpt2/encoder.json and gpt2/vocab.bpe",
    )
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="the first lines, of a model that is hardly trained; writes nothing unless --output is given",
    )
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/evaluation.json")
    args = parser.parse_args(argv)
    output = args.output or (None if args.smoke else report.RESULTS / "evaluation.json")
    result: dict[str, Any] = {**report.header("evaluation"), "goal": GOAL, "shape": SHAPE}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        texts = beginnings(args.data, folder / "texts", 20) if args.smoke else args.data
        train(args.data / "gpt2", folder, texts / LAMBADA, texts / OTHER, 2 if args.smoke else 1200)
        files = texts / WIKITEXT, texts / LAMBADA
        columns: dict[str, Scores] = {}
        for layout in (None, *(LAYOUTS[:1] if args.smoke else LAYOUTS)):
            label = f"ours, mp {layout[0]} dp {layout[1]}" if layout else "transformers"
            columns[label] = ours(folder, *files, *layout) if layout else theirs(folder, *files)
    expected, *own = columns.values()
    result |= {"scores": columns, "met": all(agrees(scores, expected) for scores in own)}
    print(
        report.table(
            ["", *expected],
            [[label, *(f"{value:,.6f}" for value in scores.values())] for label, scores in columns.items()],
        )
    )
    print(f"perplexities within {GOAL} and accuracies equal: {'yes' if result['met'] else 'NO'}")
    if output:
        report.write(output, result)
    return 0 if result["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
