"""Test errors of a user: one of two ranks prints one line that names the flag or file, and both exit with code 2."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.distributed import run_ranks
from tests.fork_server import WarmPython
from tests.megatron.gpt2.train.training_runs import write_text

ROOT = Path(__file__).resolve().parent.parent
TINY = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 16 "
    "--max-position-embeddings 16 --tokenizer-type bytes --train-iters 2 --device cpu"
).split()

# Each case is name: (flags, what the line must say). {folder} is the folder of the test.
CASES: dict[str, tuple[list[str], str]] = {
    "unknown flag": (["--num-layer", "3"], r"unknown flag --num-layer: did you mean --num-layers\?"),
    "heads": (
        "--num-attention-heads 1 --model-parallel-size 2".split(),
        r"--num-attention-heads 1 is not divisible by --tensor-model-parallel-size 2",
    ),
    "positions": (["--seq-length", "32"], r"--seq-length 32 is longer than --max-position-embeddings 16"),
    "missing file": (["--train-data", "{folder}/nowhere.jsonl"], r"--train-data.*nowhere\.jsonl"),
    "wrong key": (["--train-data", "{folder}/good.jsonl", "--text-key", "body"], r"good\.jsonl.*'body'.*--text-key"),
    "empty corpus": (["--train-data", "{folder}/empty.txt"], r"empty\.txt"),
    "unfillable split": (["--train-data", "{folder}/short.txt", "--split", "98,1,1"], r"--split 98,1,1"),
    "tracker": (["--load", "{folder}/lost"], r"lost.*latest_checkpointed_iteration\.txt|latest_checkpointed.*lost"),
    "nccl": (["--distributed-backend", "nccl"], r"--distributed-backend nccl needs a GPU.*gloo"),
    "mpi": (["--distributed-backend", "mpi"], r"--distributed-backend mpi.*gloo"),
    "world": (
        "--model-parallel-size 3 --num-attention-heads 3 --hidden-size 12 --ffn-hidden-size 12".split(),
        r"--tensor-model-parallel-size 3 needs a multiple of 3 ranks, and this run has 2",
    ),
    "accumulation": ("--micro-batch-size 3 --global-batch-size 8".split(), r"--global-batch-size 8 .*3 × 2"),
    "vocabulary": (
        ["--tokenizer-type", "GPT2BPETokenizer", "--cache-dir", "{folder}"],
        r"scripts/download_gpt2_vocab\.sh",
    ),
    "finetune": ("--finetune --load {folder}/nothing --save {folder}/x".split(), r"--load .*nothing"),
}


def run_cases(rank: int, world_size: int, folder: str) -> dict[str, tuple[int, str]]:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        XDG_CACHE_HOME=f"{folder}/cache",
    )
    from megatron.gpt2.commands import pretrain_gpt2
    from megatron.gpt2.dist import run_program

    run_program.LAUNCHER_GRACE = run_program.SILENT_GRACE = 0.0
    results = {}
    for name, (flags, _) in CASES.items():
        words = [
            *TINY,
            "--save",
            f"{folder}/save",
            "--init-method",
            f"file://{folder}/ranks meet here, {name}",
            *(flag.format(folder=folder) for flag in flags),
        ]
        with contextlib.redirect_stderr(io.StringIO()) as said:
            code = pretrain_gpt2.main(words)
        results[name] = code, said.getvalue()
    return results


def test_bad_input(tmp_path: Path):
    write_text(tmp_path)
    (tmp_path / "good.jsonl").write_text('{"text": "a document"}\n' * 50)
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "short.txt").write_text("abcdef")
    (tmp_path / "lost").mkdir()
    (tmp_path / "lost" / "latest_checkpointed_iteration.txt").write_text("300\n")
    first, second = run_ranks(run_cases, 2, str(tmp_path))
    for name, (_, expected) in CASES.items():
        code, said = first[name]
        assert code == 2 and second[name] == (2, ""), (name, code, said, second[name])
        assert said.startswith("error: ") and said.count("\n") == 1, (name, said)
        assert re.search(expected, said), (name, said)
    assert not (tmp_path / "save").exists(), "a refused run left something behind"


def torchrun(
    python: WarmPython,
    folder: Path,
    *flags: str,
    program: Sequence[str] = ("-m", "megatron.pretrain_gpt2"),
    on_line: Callable[[str, subprocess.Popen[str]], None] | None = None,
) -> tuple[int, str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder)}
    process = subprocess.Popen(
        [python.python, *"-m torch.distributed.run --standalone --nproc-per-node 2".split(), *program, *TINY, *flags],
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if on_line is not None:
            on_line(line, process)
    return process.wait(timeout=240), "".join(lines)


def test_torchrun_reports_exit_code_2_of_each_worker(python: WarmPython, tmp_path: Path):
    """This includes the case in which the rank that prints is the last to find the error."""
    (tmp_path / "late.py").write_text(
        "import os, runpy, time\ntime.sleep(4 * (os.environ['RANK'] == '0'))\n"
        "runpy.run_module('megatron.pretrain_gpt2', run_name='__main__')\n"
    )
    code, said = torchrun(python, tmp_path, "--hidden-sise", "3", program=["late.py"])
    assert code != 0
    ours = [line for line in said.splitlines() if line.startswith("error")]
    assert ours == ["error: unknown flag --hidden-sise: did you mean --hidden-size?"], said
    assert said.index(ours[0]) < said.index("ChildFailedError")
    # torchrun lists the ranks that had ended when it checked: one or both. No signal killed them.
    assert set(re.findall(r"exitcode\s*: (-?\d+)", said)) == {"2"}, said
