"""How near preprocessing comes to what its parts allow, and how far it is ahead of HF tokenizers in its place.

Every round runs each arm once, in turn, each in a process of its own that is bound to one core (two for the arm of two
workers):

    json        json.loads of every line, alone
    encode      the tokenizer on every text, alone; a new one each time, since it remembers words
    ours        tools/preprocess_data.py's function from the file to the finished pair, hashes, fsync and all
    ours x2     the same with two workers
    hf          the same pipeline with HF tokenizers in the tokenizer's place, on a part of the corpus

The limit is the time of json and encode together. The corpus is the docstrings and the sources of every installed
package, one document a file: real, at hand everywhere, and without repetitions.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.report import ROOT, spread, table

ROUNDS = 5
CORPUS_BYTES, HF_BYTES = 400_000_000, 8_000_000
ARMS = ("json", "encode", "ours", "ours x2", "hf")


def write_corpus(path: Path, size: int) -> int:
    """About `size` bytes of JSON lines; returns the bytes written. Sources are cut into documents of at most 8,000
    characters between lines, the length of a page of the web."""
    seen, written = set(), 0
    folders = [Path(name) for name in sys.path if name.endswith(("site-packages", f"python3.{sys.version_info[1]}"))]
    with open(path, "w", encoding="utf-8") as out:
        for source in sorted(file for folder in folders for kind in ("*.py", "*.md", "*.txt", "*.rst", "*.h", "*.pyi")
                             for file in folder.rglob(kind)):
            try:
                text = source.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                continue
            if hash(text) in seen or "\udc00" in text:
                continue
            seen.add(hash(text))
            while text:
                cut = text.rfind("\n", 1, 8000) + 1 or 8000
                written += out.write(json.dumps({"text": text[:cut]}, ensure_ascii=False) + "\n")
                text = text[cut:]
            if written > size:
                break
    return os.path.getsize(path)


def tokenizer_arguments() -> dict[str, Any]:
    """GPT-2's vocabulary where it is on this machine, else the shipped one."""
    from data_utils.tokenization import find_gpt2_files

    try:
        vocab, merges = find_gpt2_files(None, None, os.environ.get("GPT2_VOCAB"))
    except ValueError:
        return {"kind": "builtin"}
    return {"kind": "GPT2BPETokenizer", "vocab_file": str(vocab), "merge_file": str(merges)}


def run_arm(arm: str, path: str, scratch: str) -> float:
    """Seconds for one arm; what is loaded once (modules, the vocabulary) is not counted."""
    import data_utils.preprocessing as preprocessing
    from data_utils.tokenization import build_tokenizer

    given = tokenizer_arguments()
    if arm in ("json", "encode"):
        with open(path, "rb") as file:
            lines = file.readlines()
        texts = [json.loads(line)["text"] for line in lines] if arm == "encode" else []
        encode = build_tokenizer(**given).encode
        started = time.perf_counter()
        if arm == "json":
            for line in lines:
                json.loads(line)
        else:
            for text in texts:
                encode(text)
        return time.perf_counter() - started
    tokenizer = build_tokenizer(**given)
    if arm == "hf":
        tokenizer.encode = hf_encode(given)  # type: ignore[method-assign]
    if arm != "ours x2":
        preprocessing.build_tokenizer = lambda **_: tokenizer  # made already
    job = preprocessing.Job(inputs=(path,), output_prefix=f"{scratch}/out", keys=("text",), tokenizer=given,
                            append_eod=True, workers=2 if arm == "ours x2" else 1)
    started = time.perf_counter()
    from tools.preprocess_data import bar
    preprocessing.preprocess(job, log=print, progress=bar)
    return time.perf_counter() - started


def hf_encode(given: dict[str, Any]) -> Any:
    """HF's own GPT-2 BPE of the same files."""
    from tokenizers import ByteLevelBPETokenizer

    hf = ByteLevelBPETokenizer(given["vocab_file"], given["merge_file"])
    return lambda text: hf.encode(text).ids


def in_own_process(arm: str, path: Path) -> float:
    cores = sorted(os.sched_getaffinity(0))[:2 if arm == "ours x2" else 1]
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        code = f"import os; os.sched_setaffinity(0, {cores}); from benchmarks.data_preprocessing import run_arm; " \
               f"print(run_arm({arm!r}, {str(path)!r}, {scratch!r}))"
        run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True,
                             env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
    return float(run.stdout.split()[-1])


def measure(smoke: bool) -> dict[str, Any]:
    """The section `preprocess`: MB/s of each arm and the three ratios asked for, of each round."""
    given = tokenizer_arguments()
    arms = [arm for arm in ARMS if arm != "hf" or given["kind"] == "GPT2BPETokenizer"]
    times: dict[str, list[float]] = {arm: [] for arm in arms}
    with tempfile.TemporaryDirectory() as folder:
        whole, part = Path(folder) / "corpus.jsonl", Path(folder) / "part.jsonl"
        sizes = dict.fromkeys(arms, write_corpus(whole, 20_000_000 if smoke else CORPUS_BYTES))
        with open(whole, "rb") as file:
            lines = file.readlines(HF_BYTES // (8 if smoke else 1))
        part.write_bytes(b"".join(lines))
        sizes["hf"] = part.stat().st_size
        for number in range(1 if smoke else ROUNDS):
            for arm in arms:
                times[arm].append(in_own_process(arm, part if arm == "hf" else whole))
            print(f"round {number + 1}: " + ", ".join(
                f"{arm} {sizes[arm] / 1e6 / times[arm][-1]:.1f} MB/s" for arm in arms), flush=True)
    rates = {arm: [sizes[arm] / 1e6 / seconds for seconds in times[arm]] for arm in arms}
    limit = [json_seconds + encode for json_seconds, encode in zip(times["json"], times["encode"], strict=True)]
    ratios = {"ours to the limit of json.loads and the tokenizer": [
        a / b for a, b in zip(limit, times["ours"], strict=True)],
        "two workers to one": [a / b for a, b in zip(times["ours"], times["ours x2"], strict=True)]}
    if "hf" in rates:
        ratios["ours to HF tokenizers"] = [a / b for a, b in zip(rates["ours"], rates["hf"], strict=True)]
    print(table(["ratio", "median", "p10", "p90"], [
        [name, *(f"{spread(values)[which]:.2f}" for which in ("median", "p10", "p90"))]
        for name, values in ratios.items()]))
    return {"corpus_bytes": sizes["ours"], "tokenizer": given["kind"],
            "MB/s": {arm: spread(values) for arm, values in rates.items()},
            "ratios": {name: spread(values) for name, values in ratios.items()}}
