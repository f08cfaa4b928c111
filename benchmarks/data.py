#!/usr/bin/env python3
"""Compare preprocessing and loading of data with other libraries; the results are in benchmarks/results/data.json:

    python benchmarks/data.py                          # all sections, a few minutes
    python benchmarks/data.py --only preprocess
    python benchmarks/data.py --smoke --output DIR     # a quick check with tiny sizes

Section `preprocess` times tools/preprocess_data.py from the input file to the finished pair, including hashes, fsync
and merge. In every round, each of the following programs (arms) runs once, in a separate process that is bound to one
core (`two`: two cores). The files are in memory if possible, so that the disk is not measured:

    ours           one worker, without its start
    one, two       the corpus five times, with one worker and with two, including their start
    tiktoken       ours without gigatoken, on a part of the corpus
    hf             the same pipeline with HF tokenizers instead of ours, on that part

Ratios on one core use CPU seconds, which depend less on other processes. The ratio of two workers to one uses elapsed
time. The corpus is the text files of every installed package, cut into documents of the length of a web page.

Section `loading` times the reading of samples on one thread, from files in memory. benchmarks/data.py repeats nanoGPT's
loader, which makes a new memory map for every batch, and slices, casts and stacks each input and label. Our loader is
the loader of a training run without its thread, up to the tensor. The two loaders alternate.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # The project need not be installed.

import numpy as np
import torch

from benchmarks import harness
from data_utils import (
    BatchLoader,
    BatchSchedule,
    IndexedDatasetBuilder,
    SampleOrder,
    build_splits,
    build_tokenizer,
)
from data_utils.samplers import Order, SampleDataset

CORPUS_BYTES, PART_BYTES = 400_000_000, 10_000_000
DOCUMENT = 5000  # number of characters
ROUNDS = REPEATED = 5
WHOLE = ("ours", "one", "two")
PART = ("tiktoken", "hf")
SUFFIXES = {".py", ".pyi", ".md", ".txt", ".rst", ".h"}
SEQUENCE = 1024
BATCH = 12  # nanoGPT has this default.


def write_corpus(path: Path, size: int) -> None:
    """Write about `size` bytes of JSON lines, or fewer if the installed packages have less text."""
    seen, written = set(), 0
    folders = [Path(name) for name in sys.path if Path(name).name.startswith(("site-packages", "python3"))]
    files = sorted(file for folder in folders for file in folder.rglob("*") if file.suffix in SUFFIXES)
    with open(path, "wb") as out:
        for source in files:
            try:
                text = source.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                continue
            for start in range(0, len(text) if hash(text) not in seen else 0, DOCUMENT):
                line = json.dumps({"text": text[start : start + DOCUMENT]}, ensure_ascii=False)
                written += out.write(line.encode() + b"\n")
            seen.add(hash(text))
            if written > size:
                return


def cpu_seconds() -> float:
    uses = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(use.ru_utime + use.ru_stime for use in uses)


def run_arm(arm: str, path: str, scratch: str) -> tuple[float, float]:
    """Return elapsed and CPU seconds of one arm, without loading modules and vocabulary. GPT-2's vocabulary is in the
    user's cache or in the folder $GPT2_VOCAB."""
    from data_utils import preprocessing
    from data_utils.tokenizers import find_gpt2_files, gpt2

    vocab, merges = map(str, find_gpt2_files(None, None, os.environ.get("GPT2_VOCAB")))
    given: dict[str, Any] = {"kind": "GPT2BPETokenizer", "vocab_file": vocab, "merge_file": merges}
    if arm == "tiktoken":
        gpt2.GIGATOKEN_RELEASE = "none"
    tokenizer: Any = build_tokenizer(**given)
    if arm == "hf":
        from tokenizers import ByteLevelBPETokenizer

        hf = ByteLevelBPETokenizer(vocab, merges)
        tokenizer.encode_utf8 = lambda data: hf.encode(data.decode()).ids
    if arm != "two":
        preprocessing.build_tokenizer = lambda **_: tokenizer  # type: ignore[attr-defined]  # workers call the original
    job = preprocessing.PreprocessingJob(
        inputs=(path,) * (REPEATED if arm in ("one", "two") else 1),
        output_prefix=f"{scratch}/out",
        keys=("text",),
        tokenizer=tuple(given.items()),
        append_eod=True,
        workers=2 if arm == "two" else 1,
    )
    elapsed, used = time.perf_counter(), cpu_seconds()
    preprocessing.preprocess(job, log=print)
    return time.perf_counter() - elapsed, cpu_seconds() - used


def run_arm_in_process(arm: str, path: Path) -> tuple[float, float]:
    """Call `run_arm` in a new process that is bound to its cores."""
    cores = sorted(os.sched_getaffinity(0))[: 2 if arm == "two" else 1]
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        # Workers import the main module again, so the module needs an `if` around its calls.
        program = Path(scratch) / "arm.py"
        program.write_text(
            "import os\nfrom benchmarks.data import run_arm\nif __name__ == '__main__':\n"
            f"    os.sched_setaffinity(0, {cores})\n    print(*run_arm({arm!r}, {str(path)!r}, {scratch!r}))\n"
        )
        environment = {**os.environ, "PYTHONPATH": str(harness.ROOT), "OMP_NUM_THREADS": "1"}
        run = subprocess.run([sys.executable, program], check=True, capture_output=True, text=True, env=environment)
    elapsed, used = map(float, run.stdout.split()[-2:])
    return elapsed, used


def preprocess(smoke: bool) -> dict[str, Any]:
    """Return the MB/s of each arm, and ratios of the times within each round."""
    elapsed: dict[str, list[float]] = {arm: [] for arm in WHOLE + PART}
    used: dict[str, list[float]] = {arm: [] for arm in WHOLE + PART}
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        whole, part = Path(folder) / "corpus.jsonl", Path(folder) / "part.jsonl"
        write_corpus(whole, 20_000_000 if smoke else CORPUS_BYTES)
        with open(whole, "rb") as file:
            part.write_bytes(b"".join(file.readlines(PART_BYTES // (10 if smoke else 1))))
        paths = {arm: whole if arm in WHOLE else part for arm in WHOLE + PART}
        sizes = {arm: path.stat().st_size * (REPEATED if arm in ("one", "two") else 1) for arm, path in paths.items()}
        for number in range(1 if smoke else ROUNDS):
            for arm, path in paths.items():
                for seconds, took in zip((elapsed, used), run_arm_in_process(arm, path), strict=True):
                    seconds[arm].append(took)
            speeds = ", ".join(f"{arm} {sizes[arm] / 1e6 / used[arm][-1]:.1f}" for arm in paths)
            print(f"round {number + 1}: {speeds} MB/s", flush=True)

    def spread(above: Sequence[float], below: Sequence[float], times: float = 1.0) -> dict[str, float]:
        return harness.spread([times * a / b for a, b in zip(above, below, strict=True)])

    ratios = {
        "ours to HF tokenizers in the same pipeline": spread(used["hf"], used["ours"], sizes["ours"] / sizes["hf"]),
        "without gigatoken to HF tokenizers": spread(used["hf"], used["tiktoken"]),
        "two workers to one, elapsed": spread(elapsed["one"], elapsed["two"]),
    }
    rates = {arm: harness.spread([sizes[arm] / 1e6 / seconds for seconds in used[arm]]) for arm in paths}
    for head, found in (("ratio", ratios), ("MB/s of a core", rates)):
        rows = [[name, *(f"{row[which]:.2f}" for which in ("median", "p10", "p90"))] for name, row in found.items()]
        print("\n" + harness.format_table([head, "median", "p10", "p90"], rows))
    return {"corpus_bytes": sizes["ours"], "part_bytes": sizes["hf"], "MB/s of a core": rates, "ratios": ratios}


def loading(smoke: bool) -> dict[str, Any]:
    """Return the microseconds per sample of each loader."""
    tokenizer = build_tokenizer("bytes")
    with tempfile.TemporaryDirectory() as scratch:
        tokens = Path(scratch) / "tokens"
        draw = np.random.default_rng(0)
        with IndexedDatasetBuilder(tokens, np.dtype("<u2")) as builder:
            for _ in range(2_000 if smoke else 50_000):
                builder.add(draw.integers(0, 257, 1000))
                builder.end_document()
        given: dict[str, Any] = {"data_path": [str(tokens)], "split": "1", "tokenizer": tokenizer}
        dataset = build_splits(train_data=(), **given, seq_length=SEQUENCE, log=print).train
        order = SampleOrder(len(dataset), seed=1234)
        dataset.rows(np.arange(len(dataset)))  # Reading all rows brings every page into memory.
        loaders = {
            "nanoGPT": lambda: nanogpt_batches(tokens),
            "ours": lambda: our_batches(dataset, order),
        }
        times = harness.alternate(loaders, 9)
    figures = {name: statistics.median(values) for name, values in times.items()}
    print(
        "\n"
        + harness.format_table(["microseconds a sample", ""], [[name, f"{us:.2f}"] for name, us in figures.items()])
    )
    return {"us_a_sample": figures, "times_nanogpt": harness.ratio(times["nanoGPT"], times["ours"])}


def microseconds_per_sample(work: Callable[[], object], count: int = 100) -> float:
    """Return the time of `work`, which makes a batch, in microseconds per sample."""
    began = time.perf_counter()
    for _ in range(count):
        work()
    return 1e6 * (time.perf_counter() - began) / count / BATCH


def nanogpt_batches(prefix: Path) -> float:
    def work() -> None:
        tokens = np.memmap(f"{prefix}.bin", dtype=np.uint16, mode="r")
        starts = torch.randint(len(tokens) - SEQUENCE, (BATCH,))
        for first in (0, 1):  # `first` is 0 for inputs and 1 for labels.
            parts = (tokens[i + first : i + first + SEQUENCE].astype(np.int64) for i in starts)
            torch.stack([torch.from_numpy(part) for part in parts])

    return microseconds_per_sample(work)


def our_batches(samples: SampleDataset, order: Order) -> float:
    """Return the microseconds per sample of our loader, including the order of samples."""
    given: Any = {"micro_batch_size": BATCH, "data_parallel_rank": 0, "data_parallel_size": 1, "prefetch": 0}
    finish = lambda tokens, _: torch.from_numpy(tokens)  # noqa: E731
    loader = BatchLoader(samples, order, schedule=BatchSchedule.constant(BATCH), collate_fn=finish, **given)
    return microseconds_per_sample(lambda: next(loader), 1000)


SECTIONS = {"preprocess": preprocess, "loading": loading}


def main(argv: list[str] | None = None) -> None:
    parser = harness.make_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    args = harness.parse_args(parser, argv)
    output = args.output / "data.json"
    results = json.loads(output.read_text(encoding="utf-8")) if output.exists() else {}
    for section in args.only:
        results[section] = {**harness.header(section), **SECTIONS[section](args.smoke)}
        harness.write_json(output, results)


if __name__ == "__main__":
    main()
