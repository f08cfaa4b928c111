"""Every command of the README and of docs/ runs as it is printed, in a copy of the project; SHORTENED has those that
nobody can wait for in a test."""

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


# What is appended to a command that takes long, by the command.
TWO_STEPS = "--train-iters 2 --eval-iters 1"
TINY = "--num-layers 1 --hidden-size 64 --num-attention-heads 2 --seq-length 64"
SHORTENED = {
    # the quickstart's length: minutes on 2 cores
    "bash scripts/pretrain_gpt2.sh": TWO_STEPS,
    "bash scripts/pretrain_gpt2_distributed.sh --train-data my_text.txt --save checkpoints/gpt2_dp2": TWO_STEPS,
    "bash scripts/pretrain_gpt2_model_parallel.sh --train-data my_text.txt --save checkpoints/gpt2_mp2": TWO_STEPS,
    "bash scripts/pretrain_gpt2.sh --train-data my_text.txt --save checkpoints/mine": TWO_STEPS,
    "bash scripts/pretrain_gpt2.sh --train-data clean.json --save checkpoints/clean": TWO_STEPS,
    "bash scripts/pretrain_gpt2.sh --train-data corpus/9-split/train.jsonl --save checkpoints/webtext": TWO_STEPS,
    # on from there, beyond the quickstart's length
    "bash scripts/pretrain_gpt2.sh --load checkpoints/gpt2_mp2 --save checkpoints/gpt2_one --train-iters 2000":
        "--train-iters 4",
    "bash scripts/pretrain_gpt2_distributed.sh --load checkpoints/gpt2_mp2 --save checkpoints/gpt2_sharded "
    "--use-distributed-optimizer --train-iters 2000": "--train-iters 4",
    "bash scripts/pretrain_gpt2.sh --load checkpoints/mine --train-iters 2000": "--train-iters 4",
    # 2,000 iterations
    "python pretrain_gpt2.py --train-data my_text.txt --tokenizer-type bytes --num-layers 4 --num-attention-heads 4 "
    "--hidden-size 128 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 12 --lr 1e-3 --min-lr 1e-4 "
    "--lr-decay-style cosine --lr-warmup-iters 100 --lr-decay-iters 2000 --weight-decay 0.1 --adam-beta2 0.99 "
    "--attention-dropout 0 --hidden-dropout 0 --gelu erf --split 90,10 --eval-iters 20 --train-iters 2000 --save "
    "checkpoints/shakespeare_char": TWO_STEPS,
    # 345M parameters; the tutorial's page says what to append for a look: these are its flags, of a smaller model
    "bash scripts/pretrain_gpt2.sh --model 345m --train-data my_text.txt": f"{TINY} --micro-batch-size 1 {TWO_STEPS}",
    "bash scripts/pretrain_gpt2.sh --model 345m --data-path my_gpt2_text_document --tokenizer-type GPT2BPETokenizer "
    "--save checkpoints/medium": f"{TINY} --micro-batch-size 1 --train-iters 3",
    "bash scripts/pretrain_gpt2_distributed.sh --load checkpoints/medium --save checkpoints/medium_dp":
        "--micro-batch-size 1 --train-iters 6",
    "bash scripts/pretrain_gpt2_model_parallel.sh --load checkpoints/medium --save checkpoints/medium_mp":
        "--micro-batch-size 1 --train-iters 6",
    # a smaller file stands in the place of the published one
    "python tools/checkpoint.py convert megatron_345m checkpoints/from_345m --to native --num-attention-heads 16 "
    "--vocab-size 50257": "--num-attention-heads 4 --vocab-size 130",
}

COMMANDS = [(page, line) for page, block in blocks("bash") for line in block.splitlines()
            if line and not line.startswith("#")]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone with what a reader brings along; the commands run here one after the other, as a reader would."""
    folder = tmp_path_factory.mktemp("docs") / "project"
    for name in ("mpu", "data_utils", "megatron", "scripts", "tools", "tasks", "benchmarks", "data"):
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


@pytest.mark.timeout(1800)  # the longest chain: 7 minutes, and twice that on a slow machine
def test_commands_run_in_the_order_of_each_page(project: Path):
    python = Path(sys.executable)
    environment = {**os.environ, "PATH": f"{python.parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1",
                   "XDG_CACHE_HOME": str(project / "cache")}
    environment.pop("PYTHONPATH", None)
    for page, line in COMMANDS:
        if "scripts/test.sh" in line:
            continue  # this is it
        if "download_gpt2_vocab" in line or "345m" in page + line:
            if not TEST_DATA.is_dir():
                continue  # the one needs a network, the other what it fetches
            environment["GPT2_VOCAB_URL"] = f"file://{TEST_DATA / 'gpt2'}"
        run = subprocess.run(["bash", "-c", f"{line} {SHORTENED.get(line, '')}"], cwd=project, env=environment,
                             text=True, timeout=120, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                             stderr=subprocess.STDOUT)
        assert run.returncode == 0, f"{page}: {line}\n{run.stdout}"
        assert " is finished: " not in run.stdout, f"{page}: {line}\nhas nothing left to train\n{run.stdout}"


def test_what_is_shortened_is_printed_and_takes_long():
    lines = [line for _, line in COMMANDS]
    assert len(lines) >= 90 and SHORTENED.keys() <= set(lines)
    assert all("--train-iters 10" not in line for line in SHORTENED)
    tutorial = (ROOT / "docs" / "tutorial-345m.md").read_text().replace("\n", " ")
    for line, appended in SHORTENED.items():
        if "checkpoints/medium" in line:
            assert f"`{appended.removeprefix(TINY).strip()}`" in tutorial


@pytest.mark.parametrize(("page", "block"), blocks("python"))
def test_python_examples_run(page: str, block: str):
    run = subprocess.run([sys.executable, "-c", block], env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True,
                         timeout=60, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert run.returncode == 0, f"{page}:\n{run.stdout}"


def test_every_link_and_flag_that_is_named_exists():
    from megatron.gpt2.command_line.flags import flag_table

    known = {row[0] for row in flag_table()} | {"--help", "--index-url", "--local-dir", "--ntasks-per-node",
                                                  # of torchrun, sbatch, docker and apptainer
                                                  "--master-addr", "--nodes", "--gpus", "--ipc", "--ulimit",
                                                  "--network", "--nv", "--signal", "--gpu-bind", "--gpus-per-task"}
    for program in (*(ROOT / "megatron" / "gpt2" / "programs").rglob("*.py"), *(ROOT / "benchmarks").glob("*.py"),
                    ROOT / "data_utils" / "curation" / "command_line.py"):
        for names in re.findall(r'add_argument\(((?:"--[\w-]+",? ?)+)', program.read_text()):
            known |= set(re.findall(r"--[\w-]+", names))
    known |= set(re.findall(r"^ +(--[\w-]+)\)", (ROOT / "scripts/prepare_openwebtext.sh").read_text(), re.MULTILINE))
    for page in PAGES:
        text = page.read_text()
        for link in re.findall(r"\]\(([^)#:]+)\)", text):
            assert (page.parent / link).exists(), f"{page.name} links to {link}"
        for flag in re.findall(r"(?<![\w-])(--[a-zA-Z][\w-]+)", text):
            assert flag in known, f"{page.name} names {flag}"


ROOMS = ("mpu", "data_utils", "megatron", "scripts", "tools", "tasks", "tests", "benchmarks", "docs")


def test_every_path_that_is_named_exists():
    """In the pages, in backquotes, files and folders; in the sources, which make up names too, files of the project."""
    rooms = "|".join(ROOMS)
    named = [(page, path) for page in (*PAGES, ROOT / "CONTRIBUTING.md")
             for path in re.findall(rf"`((?:{rooms})/[\w/.-]*)(?:::\w+)?`", page.read_text())]
    sources = [path for room in ROOMS if room not in ("tests", "docs") for path in (ROOT / room).rglob("*")
               if path.suffix in (".py", ".sh", ".slurm")]
    in_source = re.compile(rf"(?<![\w/.<{{$-])((?:{rooms})/[\w/.-]*\w\.(?:py|sh|slurm|md|html|txt|json))\b")
    named += [(source, path) for source in sources for path in in_source.findall(source.read_text())]
    assert len(named) > 300
    missing = {f"{source.relative_to(ROOT)} names {path}" for source, path in named if not (ROOT / path).exists()}
    assert not missing, missing
