"""Every command of the README and of docs/ runs, in a copy of the project, shortened by flags appended to it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from data_utils.tokenization_gpt2 import END_OF_TEXT, byte_alphabet
from tests.conftest import TEST_DATA
from tests.megatron.gpt2.training.training_runs import write_text

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(language: str) -> list[tuple[str, str]]:
    """(page, block) for each fenced block of a language."""
    return [(page.name, block) for page in PAGES
            for block in re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)]


COMMANDS = [(page, line) for page, block in blocks("bash") for line in block.splitlines()
            if line and not line.startswith("#")]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone with what a reader brings along; the commands run here one after the other, as a reader would."""
    folder = tmp_path_factory.mktemp("docs") / "project"
    for name in ("mpu", "data_utils", "megatron", "scripts", "tools", "benchmarks", "data"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pretrain_gpt2.py", "generate_samples.py", "evaluate_gpt2.py", "constraints.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, folder / name)
    write_text(folder, 3000).rename(folder / "my_text.txt")
    write_text(folder, 300).rename(folder / "other_text.txt")
    write_gpt2(folder / "gpt2")
    if TEST_DATA.is_dir():
        release = TEST_DATA / "megatron-2019" / "tp2" / "checkpoint"
        shutil.copytree(release, folder / "megatron_345m", copy_function=shutil.copyfile)
    return folder


def write_gpt2(folder: Path) -> None:
    """In the place of a download: a tiny model in Hugging Face's form, of single bytes."""
    from transformers import GPT2Config, GPT2LMHeadModel

    tokens = [*byte_alphabet(), END_OF_TEXT]
    GPT2LMHeadModel(GPT2Config(vocab_size=len(tokens), n_positions=64, n_embd=32, n_layer=2, n_head=2,
                               bos_token_id=256, eos_token_id=256)).save_pretrained(folder)
    (folder / "vocab.json").write_text(json.dumps({token: number for number, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")


def shortened(line: str) -> str:
    """The same command, shorter: fewer iterations, and a named size cut to what a test can wait for."""
    if "convert megatron_345m" in line:
        return line + " --num-attention-heads 4 --vocab-size 130"  # of the file that stands for it
    if "pretrain_gpt2" not in line:
        return line + (" --max-new-tokens 5" if "generate_text" in line else "")
    if "--load" in line and "--finetune" not in line:
        return line + " --train-iters 4"
    if "--model" in line:
        line += " --num-layers 1 --hidden-size 64 --num-attention-heads 2 --micro-batch-size 1 --seq-length 64"
    return line + " --train-iters 2 --eval-iters 1"


@pytest.mark.timeout(900)
def test_commands_run_in_the_order_of_each_page(project: Path):
    python = Path(sys.executable)
    environment = {**os.environ, "PATH": f"{python.parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1",
                   "XDG_CACHE_HOME": str(project / "cache")}
    environment.pop("PYTHONPATH", None)
    assert len(COMMANDS) >= 10
    for page, line in COMMANDS:
        if "scripts/test.sh" in line:
            continue  # this is it
        if "download_gpt2_vocab" in line or "345m" in page + line:
            if not TEST_DATA.is_dir():
                continue  # the one needs a network, the other what it fetches
            environment["GPT2_VOCAB_URL"] = f"file://{TEST_DATA / 'gpt2'}"
        run = subprocess.run(["bash", "-c", shortened(line)], cwd=project, env=environment, text=True, timeout=120,
                             stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert run.returncode == 0, f"{page}: {line}\n{run.stdout}"


@pytest.mark.parametrize(("page", "block"), blocks("python"))
def test_python_examples_run(page: str, block: str):
    run = subprocess.run([sys.executable, "-c", block], env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True,
                         timeout=60, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert run.returncode == 0, f"{page}:\n{run.stdout}"


def test_every_file_and_flag_that_is_named_exists():
    from megatron.gpt2.command_line.flags import flag_table

    known = {row[0] for row in flag_table()} | {"--help", "--index-url", "--local-dir", "--ntasks-per-node",
                                                  # of torchrun, sbatch, docker and apptainer
                                                  "--master-addr", "--nodes", "--gpus", "--ipc", "--ulimit",
                                                  "--network", "--nv"}
    for program in (*(ROOT / "tools").rglob("*.py"), *(ROOT / "benchmarks").glob("*.py"),
                    ROOT / "data_utils" / "curation" / "command_line.py"):
        for names in re.findall(r'add_argument\(((?:"--[\w-]+",? ?)+)', program.read_text()):
            known |= set(re.findall(r"--[\w-]+", names))
    known |= set(re.findall(r"^ +(--[\w-]+)\)", (ROOT / "scripts/prepare_openwebtext.sh").read_text(), re.MULTILINE))
    for page in PAGES:
        text = page.read_text()
        for link in re.findall(r"\]\(([^)#:]+)\)", text):
            assert (page.parent / link).exists(), f"{page.name} links to {link}"
        for path in re.findall(r"`((?:scripts|tools|tests|benchmarks|megatron|docs)/[\w/.]+)`", text):
            assert (ROOT / path).exists(), f"{page.name} names {path}"
        for flag in re.findall(r"(?<![\w-])(--[a-zA-Z][\w-]+)", text):
            assert flag in known, f"{page.name} names {flag}"
