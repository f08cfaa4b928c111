"""How near preprocessing comes to what its parts allow, and how far it is ahead of HF tokenizers in its place.

Every round runs each arm once, in turn, each in a process of its own that is bound to one core (two for the arm
`two`), its files in memory where there is such a folder, so that no disk is measured:

    json           json.loads of every line, alone
    encode         the tokenizer on every text, alone; a new one each time, since gigatoken remembers words
    ours           what tools/preprocess_data.py does, from the file to the finished pair: hashes, fsync, merge
    one, two       the corpus five times over with one worker and with two, whose start is counted
    encode, ours (tiktoken)   the same without gigatoken, on a part of the corpus
    hf             the same pipeline with HF tokenizers in the tokenizer's place, on that part

The limit is the time of json and encode together. Ratios on one core are of processor seconds, which neighbours on the
machine disturb less; that of two workers to one is of elapsed time. The corpus is the text files of every installed
package, cut into documents of the length of a web page: real, at hand everywhere, and hardly ever repeated.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.report import ROOT, spread, table

ROUNDS = 5
CORPUS_BYTES, PART_BYTES = 400_000_000, 10_000_000
DOCUMENT = 5000  # characters
WHOLE = ("json", "encode", "ours", "one", "two")
REPEATED = 5
PART = ("json part", "encode (tiktoken)", "ours (tiktoken)", "hf")
SUFFIXES = {".py", ".pyi", ".md", ".txt", ".rst", ".h"}


def write_corpus(path: Path, size: int) -> None:
    """About `size` bytes of JSON lines, fewer where fewer are installed."""
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


def tokenizer_arguments() -> dict[str, Any]:
    """GPT-2's vocabulary from the user's cache or $GPT2_VOCAB, a folder."""
    from data_utils.tokenizers import find_gpt2_files

    vocab, merges = find_gpt2_files(None, None, os.environ.get("GPT2_VOCAB"))
    return {"kind": "GPT2BPETokenizer", "vocab_file": str(vocab), "merge_file": str(merges)}


def processor_seconds() -> float:
    return sum(
        use.ru_utime + use.ru_stime for use in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def run_arm(arm: str, path: str, scratch: str) -> tuple[float, float]:
    """Elapsed and processor seconds of one arm. What one process loads once, modules and vocabulary, is not counted."""
    from data_utils.preprocessing import preprocess as preprocessing
    from data_utils.tokenizers import build_tokenizer, gpt2

    given = tokenizer_arguments()
    if "tiktoken" in arm:
        gpt2.GIGATOKEN_RELEASE = "none"
    tokenizer: Any = build_tokenizer(**given)
    lines = Path(path).read_bytes().splitlines() if arm.startswith(("json", "encode")) else []
    texts = [json.loads(line)["text"] for line in lines] if arm.startswith("encode") else []
    if arm == "hf":
        from tokenizers import ByteLevelBPETokenizer

        hf = ByteLevelBPETokenizer(given["vocab_file"], given["merge_file"])
        tokenizer.encode_utf8 = lambda data: hf.encode(data.decode()).ids
    if arm != "two":
        preprocessing.build_tokenizer = lambda **_: tokenizer  # type: ignore[attr-defined]  # workers build their own
    job = preprocessing.Job(
        inputs=(path,) * (REPEATED if arm in ("one", "two") else 1),
        output_prefix=f"{scratch}/out",
        keys=("text",),
        tokenizer=given,
        append_eod=True,
        workers=2 if arm == "two" else 1,
    )
    elapsed, used = time.perf_counter(), processor_seconds()
    if arm.startswith("json"):
        for line in lines:
            json.loads(line)
    elif arm.startswith("encode"):
        for text in texts:
            tokenizer.encode(text)
    else:
        preprocessing.preprocess(job, log=print)
    return time.perf_counter() - elapsed, processor_seconds() - used


def in_own_process(arm: str, path: Path) -> tuple[float, float]:
    cores = sorted(os.sched_getaffinity(0))[: 2 if arm == "two" else 1]
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        # The guard is for the workers, which import the main module again.
        program = Path(scratch) / "arm.py"
        program.write_text(
            "import os\nfrom benchmarks.data_preprocessing import run_arm\nif __name__ == '__main__':\n"
            f"    os.sched_setaffinity(0, {cores})\n"
            f"    print(*run_arm({arm!r}, {str(path)!r}, {scratch!r}))\n"
        )
        run = subprocess.run(
            [sys.executable, program],
            check=True,
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )
    elapsed, used = map(float, run.stdout.split()[-2:])
    return elapsed, used


def measure(smoke: bool) -> dict[str, Any]:
    """The section `preprocess`: MB/s of each arm, and the ratios asked for, each of one round's figures."""
    elapsed: dict[str, list[float]] = {arm: [] for arm in WHOLE + PART}
    used: dict[str, list[float]] = {arm: [] for arm in WHOLE + PART}
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        whole, part = Path(folder) / "corpus.jsonl", Path(folder) / "part.jsonl"
        write_corpus(whole, 20_000_000 if smoke else CORPUS_BYTES)
        with open(whole, "rb") as file:
            part.write_bytes(b"".join(file.readlines(PART_BYTES // (10 if smoke else 1))))
        sizes = {
            arm: (whole if arm in WHOLE else part).stat().st_size * (REPEATED if arm in ("one", "two") else 1)
            for arm in WHOLE + PART
        }
        for number in range(1 if smoke else ROUNDS):
            for arm in WHOLE + PART:
                seconds = in_own_process(arm, whole if arm in WHOLE else part)
                elapsed[arm].append(seconds[0])
                used[arm].append(seconds[1])
            print(
                f"round {number + 1}: "
                + ", ".join(f"{arm} {sizes[arm] / 1e6 / used[arm][-1]:.1f}" for arm in WHOLE + PART)
                + " MB/s",
                flush=True,
            )

    def ratio(above: list[float], below: list[float]) -> list[float]:
        return [a / b for a, b in zip(above, below, strict=True)]

    def both(first: str, second: str) -> list[float]:
        return [a + b for a, b in zip(used[first], used[second], strict=True)]

    ratios = {
        "ours to the limit of json.loads and the tokenizer": ratio(both("json", "encode"), used["ours"]),
        "the same without gigatoken": ratio(both("json part", "encode (tiktoken)"), used["ours (tiktoken)"]),
        "ours to HF tokenizers in the same pipeline": [
            a * sizes["ours"] / sizes["hf"] for a in ratio(used["hf"], used["ours"])
        ],
        "without gigatoken to HF tokenizers": ratio(used["hf"], used["ours (tiktoken)"]),
        "two workers to one, elapsed": ratio(elapsed["one"], elapsed["two"]),
    }
    rates = {arm: spread([sizes[arm] / 1e6 / seconds for seconds in used[arm]]) for arm in WHOLE + PART}
    for head, rows in (("ratio", {name: spread(values) for name, values in ratios.items()}), ("MB/s of a core", rates)):
        print(
            "\n"
            + table(
                [head, "median", "p10", "p90"],
                [[name, *(f"{row[which]:.2f}" for which in ("median", "p10", "p90"))] for name, row in rows.items()],
            )
        )
    return {
        "corpus_bytes": sizes["ours"],
        "part_bytes": sizes["hf"],
        "MB/s of a core": rates,
        "ratios": {name: spread(values) for name, values in ratios.items()},
    }
