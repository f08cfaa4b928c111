#!/usr/bin/env python3
"""How well a small model learns in minutes on a CPU, at full length, results as JSON beside their log and plot:

    python benchmarks/learning.py quickstart                     # scripts/pretrain_gpt2.sh without flags
    python benchmarks/learning.py shakespeare --text input.txt   # the last 10 % of the bytes held out, scored whole

The score is bits per byte of text that was never trained on; the seconds are those of the whole program, tokenising,
evaluation and closing report included. The quickstart's sample has to read as English: of what is not white space 95 %
are letters and plain punctuation.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"

PLAIN_SHARE = 0.95
PLAIN_SIGNS = ".,;:!?'\"()-‘’“”"

# 4 layers, bytes; every byte of the last tenth is scored once, in windows that do not overlap. Measured on the way, at
# equal time: width 192 beats 256 and sequences of 256 beat 512; initial weights of 0.06 instead of 0.02 save some 200
# steps; dropout of 0.1 costs more than it gains in 4 minutes.
SHAKESPEARE = (
    "--tokenizer-type bytes --split 90,10 --num-layers 4 --hidden-size 192 --num-attention-heads 3 "
    "--gelu erf --seq-length 256 --max-position-embeddings 256 --micro-batch-size 8 --attention-dropout 0 "
    "--hidden-dropout 0 --init-method-std 0.06 --lr 2.5e-3 --min-lr 0 --lr-decay-style cosine --warmup 0.02 "
    "--weight-decay 0.3 --adam-beta2 0.99 --train-iters 3800 --eval-interval 1900 --eval-iters 1000000 "
    "--log-interval 100"
)


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    import torch

    names = (
        re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        if Path("/proc/cpuinfo").exists()
        else [platform.processor()]
    )
    return {
        "cpu": names[0],
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
        ).stdout.strip(),
    }


def share_of_plain_characters(text: str) -> float:
    """The share of letters and plain punctuation among all characters that are not white space, from 0 to 1."""
    seen = "".join(text.split())
    return sum(character.isalpha() or character in PLAIN_SIGNS for character in seen) / max(len(seen), 1)


def measure(name: str, flags: list[str], results: Path) -> dict[str, Any]:
    """Run the training program in an empty folder; keep its log and plot in `results`."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "pretrain_gpt2.py"), *flags, "--save", f"{folder}/gpt2_{name}"]
        started = time.perf_counter()
        run = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        seconds = time.perf_counter() - started
        log = run.stdout.replace(folder, ".").replace(os.path.relpath(ROOT, folder) + "/", "")
        for flag in flags:  # where a file lies is this machine's affair
            log = log.replace(flag, Path(flag).name) if os.sep in flag else log
        (results / f"{name}.log").write_text(log)
        if run.returncode:
            raise SystemExit(f"{shlex.join(command)} failed, see {results / name}.log")
        shutil.copy(f"{folder}/gpt2_{name}/loss.png", results / f"{name}.png")
        samples = Path(f"{folder}/gpt2_{name}/samples.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in Path(f"{folder}/gpt2_{name}/metrics.jsonl").read_text().splitlines()]
    sample = json.loads(samples[-1])["text"]
    if name == "quickstart" and share_of_plain_characters(sample) < PLAIN_SHARE:
        raise SystemExit(f"the sample does not read as English: {sample}")
    trained = [record for record in records if "split" not in record]
    evaluated = {record["split"]: record for record in records if "split" in record}
    baselines = dict(re.findall(r"^  (unigram entropy|xz -9).*?  ([\d.]+)$", run.stdout, re.MULTILINE))
    return {
        "name": name,
        "date": date.today().isoformat(),
        "machine": machine(),
        "flags": shlex.join(flags),
        "seconds": round(seconds, 1),
        "iterations": trained[-1]["iteration"],
        "training_seconds": round(
            sum(
                record["ms_per_iteration"] * (record["iteration"] - before["iteration"]) / 1000
                for before, record in zip([{"iteration": 0}, *trained], trained, strict=False)
            ),
            1,
        ),
        "tokens_per_second": trained[-1]["tokens_per_second"],
        "mfu": trained[-1]["mfu"],
        "sample": sample,
        "plain_share_of_sample": round(share_of_plain_characters(sample), 4),
        "valid_bits_per_byte": evaluated["valid"]["bits_per_byte"],
        "baselines_bits_per_byte": {key: float(value) for key, value in baselines.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("quickstart", "shakespeare"))
    parser.add_argument("--text", help="tinyshakespeare's input.txt")
    parser.add_argument("--train-iters", help="fewer, to try the script")
    parser.add_argument("--seed", help="another than the preset's; its results lie in a folder of that name")
    arguments = parser.parse_args()
    if arguments.what == "shakespeare" and not arguments.text:
        parser.error("shakespeare needs --text FILE")
    flags = [] if arguments.what == "quickstart" else ["--train-data", arguments.text, *shlex.split(SHAKESPEARE)]
    if arguments.train_iters:
        flags += ["--train-iters", arguments.train_iters]
    results = RESULTS
    if arguments.seed:
        flags += ["--seed", arguments.seed]
        results = RESULTS / f"seed_{arguments.seed}"
    results.mkdir(exist_ok=True)
    result = measure(arguments.what, flags, results)
    if arguments.text:  # its folder is this machine's affair
        result["flags"] = result["flags"].replace(arguments.text, Path(arguments.text).name)
    (results / f"{arguments.what}.json").write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
