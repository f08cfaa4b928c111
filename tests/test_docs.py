"""Test that every command of the README and of docs/ runs as printed, in a copy of the project, and that the pages name
only files, flags and tests that exist. SHORTENED lists commands that take too long for a test. Two tests belong to
entries of docs/how-to/troubleshooting.md."""

from __future__ import annotations

import contextlib
import io
import json
import linecache
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron.gpt2.config.arguments import parse
from megatron.gpt2.dist.ranks import RankInfo
from megatron.gpt2.formats import open_checkpoint
from megatron.gpt2.train.setup import build_context
from tests.conftest import ROOT, TEST_DATA, made_once, tool
from tests.data_utils.data_files import write_byte_vocabulary
from tests.fork_server import WarmPython
from tests.megatron.gpt2.formats.sample_checkpoints import random_weights, write_megatron
from tests.megatron.gpt2.train.training_runs import write_text
from tests.test_import_rules import imported

PAGES = {
    str(path.relative_to(ROOT)): path.read_text() for path in (ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")))
}


def blocks(language: str) -> list[tuple[str, str]]:
    """Return (page, block) for each fenced block of a language."""
    return [
        (page, block)
        for page, text in PAGES.items()
        for block in re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    ]


COMMANDS = [
    (page, line)
    for page, block in blocks("bash")
    for line in re.sub(r"\\\n *", "", block).splitlines()  # A line that ends in \ continues on the next one.
    if line and not line.startswith("#")
]

SHAPE = "--num-layers 1 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64"
STEPS = "--train-iters 2 --eval-iters 1"
QUICKSTART = f"--model quickstart {SHAPE} --micro-batch-size 2 --eval-iters 1"
NEW_RUN = r"pretrain_gpt2\w*\.(?:sh|py)(?!.*(?:--load|--model|--config|--num-layers))"
# {pattern of commands that take too long for a test: flags that the test appends}. The first match counts.
SHORTENED = {
    # A model of a different shape has a different default folder.
    r"^bash scripts/pretrain_gpt2.sh$": f"{QUICKSTART} --train-iters 2 --save checkpoints/gpt2_quickstart",
    # An iteration of the quickstart's model takes seconds while other tests run.
    rf"{NEW_RUN}(?!.*--train-iters)": f"{QUICKSTART} --train-iters 2",
    r"--nproc-per-node 2 --pipeline-model-parallel-size 2 .*--train-iters 10$": f"{QUICKSTART} --num-layers 2",
    rf"{NEW_RUN}.*--train-iters 1\d$": QUICKSTART,
    r"--load checkpoints/\w+ .*--train-iters 400$": "--train-iters 4",
    r"--save checkpoints/shakespeare_char$": STEPS,
    r"--finetune --load checkpoints/gpt2_native ": STEPS,
    r"--save checkpoints/pasted ": "--train-iters 10",
    r"--model 345m --train-data my_text.txt$": f"{SHAPE} --micro-batch-size 1 {STEPS}",
    # The page of the GPT-2 345M tutorial gives flags for a short trial. SHAPE also makes the model small.
    r"--model 345m .*--save checkpoints/medium$": f"{SHAPE} --micro-batch-size 1 --train-iters 3",
    r"--load checkpoints/medium --save ": "--micro-batch-size 1 --train-iters 6",
    # The test has a smaller file instead of the published one.
    r"convert megatron_345m ": "--num-attention-heads 4 --vocab-size 130",
    # The test's model has one layer, so it has one stage.
    r"convert .* --pipeline-model-parallel-size 2$": "--pipeline-model-parallel-size 1",
    r"--search": f"{SHAPE} --ranks 2 --global-batch-size 2",
    r"verify.py .* -- --model quickstart ": SHAPE,
}


def appended(line: str) -> str:
    """Return the flags of SHORTENED for a command, or an empty string."""
    return next((flags for pattern, flags in SHORTENED.items() if re.search(pattern, line)), "")


# `reader` runs the two trainings of the README.
FIRST = [line for page, line in COMMANDS if page == "README.md" and "scripts/pretrain_gpt2" in line][:2]


@pytest.fixture(scope="session")
def reader(shared_folder: Path, python: WarmPython) -> Path:
    """Return a copy of the project with the files that the pages assume: texts, downloaded models, and the README's two
    checkpoints. All test processes share this copy."""

    def make(folder: Path) -> None:
        make_project(folder)
        for line in FIRST:
            run(line, folder, python)

    return made_once(shared_folder / "docs", make)


def make_project(folder: Path) -> None:
    for name in "clusters mpu data_utils megatron scripts tools tasks benchmarks data examples".split():
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in "pretrain_gpt2.py generate_samples.py evaluate_gpt2.py constraints.txt pyproject.toml LICENSE".split():
        shutil.copy(ROOT / name, folder / name)
    write_text(folder, 3000).rename(folder / "my_text.txt")
    write_text(folder, 300).rename(folder / "other_text.txt")
    write_gpt2(folder / "gpt2")
    if TEST_DATA.is_dir():
        release = TEST_DATA / "megatron-2019" / "tp2" / "checkpoint"
        shutil.copytree(release, folder / "megatron_345m", copy_function=shutil.copyfile)


def write_gpt2(folder: Path) -> None:
    """Write a tiny byte-level model in Hugging Face's format, instead of a download."""
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(
        GPT2Config(vocab_size=257, n_positions=64, n_embd=32, n_layer=2, n_head=2, bos_token_id=256, eos_token_id=256)
    ).save_pretrained(folder)
    write_byte_vocabulary(folder / "vocab.json", folder / "merges.txt")


def run(line: str, folder: Path, python: WarmPython) -> str:
    """Run a command in a folder, with its flags of SHORTENED, and return its output."""
    environment = {
        **os.environ,
        "PATH": python.path,
        "OMP_NUM_THREADS": "1",
        "XDG_CACHE_HOME": str(folder / "cache"),
        "GPT2_VOCAB_URL": f"file://{TEST_DATA / 'gpt2'}",
    }
    environment.pop("PYTHONPATH", None)
    ran = subprocess.run(
        ["bash", "-c", f"{line} {appended(line)}"],
        cwd=folder,
        env=environment,
        text=True,
        timeout=240,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert ran.returncode == 0, f"{line}\n{ran.stdout}"
    assert " is finished: " not in ran.stdout, f"{line}\nhas nothing left to train\n{ran.stdout}"
    return ran.stdout


# The commands of a page in LONG take as long as those of all how-to guides together.
LONG = {"docs/tutorials/gpt2-345m.md"}
# On these pages, the block after a command shows its output.
PRINTED = {"docs/explanation/memory.md", "docs/tutorials/distributed.md", "docs/tutorials/scaling.md"}


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.wide] if page in LONG else [])
        for page in dict.fromkeys(page for page, _ in COMMANDS)
    ],
)
def test_commands_run_in_the_order_of_each_page(page: str, reader: Path, python: WarmPython, tmp_path: Path):
    """Run all commands of a page. They need no other page, except the checkpoints of the README's first two runs."""
    shutil.copytree(reader, tmp_path / "project", ignore=shutil.ignore_patterns("__pycache__"))
    printed = {}
    for line in (line for of, line in COMMANDS if of == page):
        if re.search(r"^git clone |scripts/test\w*\.sh|\.venv-cuda/", line):
            # Skip the download of the project and the commands that run the tests. tests/fake_cuda tests .venv-cuda.
            continue
        if page == "README.md" and line in FIRST:
            continue  # `reader` has already run the README's first commands.
        needs_vocabulary = "345m" in page or ("345m" in line and "plan.py" not in line)
        if not TEST_DATA.is_dir() and ("download_gpt2_vocab" in line or needs_vocabulary):
            continue  # The download needs a network, and the other commands need the downloaded files.
        printed[line] = run(line, tmp_path / "project", python)
    if page in PRINTED:
        shown = re.findall(r"^```bash\n(.*?)^```\n\n```\n(.*?)^```$", PAGES[page], re.MULTILINE | re.DOTALL)
        assert len(shown) > 1
        for commands, block in shown:
            check_printed(block, "".join(printed.get(line, "") for line in commands.splitlines()))


def check_printed(block: str, output: str) -> None:
    """Check that the output contains the lines of a page's block, in order. `…` matches any text, and the last digits
    of a decimal fraction may differ, because they depend on the processor."""
    number = r"-?\d+\.\d+(?:E[+-]\d+)?"
    rest = iter(output.splitlines())
    for shown in block.splitlines():
        words = re.split(f"({number}|…)", shown)
        values = pytest.approx([float(word) for word in words if re.fullmatch(number, word)], rel=1e-3)
        pattern = "".join(
            ".*" if word == "…" else f"({number})" if re.fullmatch(number, word) else re.escape(word) for word in words
        )
        assert any(
            found is not None and [*map(float, found.groups())] == values
            for found in (re.fullmatch(pattern, line) for line in rest)
        ), f"{shown}\nis not in\n{output}"


# {program that a cell of a notebook starts: a pattern that the cell must print}
CELL_OUTPUT = {
    "pretrain_gpt2.py": r"saved checkpoints/\w+/iter_00000",
    "tools/plan.py": r"\n  all +\d",
    "tools/generate_text.py": r"The \w",
    "tools/checkpoint.py": r"exports/one_gpu",
}


@pytest.mark.parametrize("notebook, checks", [("distributed", 17), ("one_gpu", 5)])
def test_the_notebooks_print_what_they_show(
    reader: Path, python: WarmPython, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, notebook: str, checks: int
):
    """The cells of the notebooks are plain Python, so the test needs no Jupyter."""
    shutil.copytree(reader, tmp_path / "project", ignore=shutil.ignore_patterns("__pycache__"))
    folder = tmp_path / "project" / "examples"
    for name, value in (("OMP_NUM_THREADS", "1"), ("XDG_CACHE_HOME", str(tmp_path))):
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "executable", python.python)
    cells: dict[str, object] = {}
    shown = 0
    try:
        for number, cell in enumerate(json.loads((folder / f"{notebook}.ipynb").read_text())["cells"]):
            source = "".join(cell["source"])
            if cell["cell_type"] == "markdown":
                for link in re.findall(r"\]\(([^)#:]+)\)", source):
                    assert (ROOT / "examples" / link).exists(), link
                continue
            name = f"<cell {number}>"
            linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name  # as Jupyter does
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(source, name, "exec"), cells)
            for output in cell["outputs"]:
                assert len("".join(output["text"]).splitlines()) == len(printed.getvalue().splitlines())
                check_printed("".join(output["text"]), printed.getvalue())
                shown += 1
            for pattern in (CELL_OUTPUT[program] for program in CELL_OUTPUT if f'"{program}"' in source):
                assert re.search(pattern, printed.getvalue()), printed.getvalue()
                shown += 1
    finally:
        for module in ("cells", "ranks"):
            sys.modules.pop(module, None)
    assert shown == checks


def test_what_is_shortened_is_printed():
    assert FIRST[0] == "bash scripts/pretrain_gpt2.sh" and FIRST[1].endswith("--save checkpoints/gpt2_mp2")
    lines = [line for _, line in COMMANDS]
    assert len(lines) >= 90 and all(any(re.search(pattern, line) for line in lines) for pattern in SHORTENED)


@pytest.mark.parametrize("page, block", blocks("python"))
def test_python_examples_run(page: str, block: str, python: WarmPython, tmp_path: Path):
    run(f"python -c {shlex.quote(block)}", tmp_path, python)


def test_every_link_and_flag_that_is_named_exists():
    from megatron.gpt2.commands.generate_text import SAMPLING_FLAGS
    from megatron.gpt2.config.compat import MEGATRON_RULES, find_rule
    from megatron.gpt2.config.flags import build_parser

    # Flags of pip, torchrun, sbatch, docker, apptainer, pytest, lm-eval, Megatron and nanoGPT.
    others = """--help --index-url --local-dir --rdzv-backend --rdzv-conf --rdzv-endpoint --rdzv-id --master-addr
        --nodes --gpus --signal --ntasks-per-node --gpu-bind --gpus-per-task --ipc --ulimit --network --nv
        --collect-only --model_args --use-checkpoint-opt_param-scheduler --out_dir --init_from"""
    known = {*others.split(), *build_parser()._option_string_actions, *MEGATRON_RULES}
    known |= {f"--{name.replace('_', '-')}" for name in SAMPLING_FLAGS}
    for folder in ("megatron", "data_utils", "benchmarks", "examples"):
        for program in (ROOT / folder).rglob("*.py"):
            known |= set(re.findall(r'"(--[\w-]+)",', program.read_text()))
    known |= set(re.findall(r"^ +(--[\w-]+)\)", (ROOT / "scripts/prepare_openwebtext.sh").read_text(), re.MULTILINE))
    for page, text in PAGES.items():
        for link in re.findall(r"\]\(([^)#:]+)\)", text):
            assert (ROOT / page).parent.joinpath(link).exists(), f"{page} links to {link}"
        for flag in re.findall(r"(?<![\w-])(--[a-zA-Z][\w-]+)(?![\w*-])", text):
            assert flag in known or find_rule(MEGATRON_RULES, flag), f"{page} names {flag}"


FOLDERS = ("mpu", "data_utils", "megatron", "scripts", "tools", "tasks", "tests", "benchmarks", "docs")


def test_every_path_that_is_named_exists():
    """Check all paths in backquotes on the pages, and all files of the project that sources and scripts name."""
    folders = "|".join(FOLDERS)
    on_page = re.compile(rf"`((?:{folders})/[\w/.-]*)(?:::\w+)?`")
    in_source = re.compile(rf"(?<![\w/.<{{$-])((?:{folders})/[\w/.-]*\w\.(?:py|sh|slurm|md|html|txt|json))\b")
    sources = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if folder not in ("tests", "docs")]
    patterns = {ROOT / page: on_page for page in (*PAGES, "CONTRIBUTING.md")}
    patterns |= {path: in_source for path in sources if path.suffix in (".py", ".sh", ".slurm")}
    named = [(file, path) for file, pattern in patterns.items() for path in pattern.findall(file.read_text())]
    assert len(named) > 300
    missing = {f"{file.relative_to(ROOT)} names {path}" for file, path in named if not (ROOT / path).exists()}
    assert not missing, missing


@pytest.mark.parametrize("name", ["checkpoint", "layer", "step"])
def test_a_figure_is_what_its_script_draws(name: str, python: WarmPython, tmp_path: Path):
    figures = ROOT / "docs" / "figures"
    drawn = run(f"python {figures}/draw_{name}.py", tmp_path, python)
    assert drawn == (figures / f"{name}.svg").read_text(encoding="utf-8")


PAGE = (ROOT / "docs" / "how-to" / "troubleshooting.md").read_text()
# (title, text) of each entry of troubleshooting.md
ENTRIES = re.findall(r"^### (.+)\n((?:(?!#{2,3} ).*\n)*)", PAGE, re.MULTILINE)


def test_every_entry_names_tests_that_exist():
    assert len(ENTRIES) > 15
    for title, text in ENTRIES:
        named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", text)
        assert named and text.count("::") == len(named), f"{title}: it names no test, or names one in another form"
        for file, name in named:
            assert f"\ndef {name}(" in (ROOT / file).read_text(), f"{title}: {file}::{name}"


# ----------------------------------------------------------------------------------------------- install and launch

PROGRAM = [
    path
    for folder in ("mpu", "data_utils", "megatron", "tools")
    for path in sorted((ROOT / folder).rglob("*"))
    if "__pycache__" not in path.parts
]


def test_nothing_has_to_be_built():
    """No source needs a compiler or a library of CUDA kernels, or imports a private module of torch, which a later
    version of torch may lack. The private module `torch.utils._python_dispatch` is in torch's documentation."""
    assert len(PROGRAM) > 100
    assert {path.suffix for path in PROGRAM} & {".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".so"} == set()
    for path in (path for path in PROGRAM if path.suffix == ".py"):
        built = r"(apex|amp_C|transformer_engine|flash_attn|deepspeed)\b|.*cpp_extension"
        private = r"torch\.(?!utils\._python_dispatch\b).*\b_"
        wrong = [name for name in imported(path) if re.match(f"{built}|{private}", name)]
        assert not wrong, f"{path} imports {wrong}"


# ------------------------------------------------------------------------------------------------------- checkpoints


def test_megatrons_own_sharded_optimizer_is_left_out_loudly(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Megatron v3.0 (2023) writes model_rng.pt for each model-parallel rank, and optim.pt for each data-parallel rank
    in a separate folder. The conversion prints that it leaves out optim.pt."""
    weights = random_weights()
    write_megatron(tmp_path / "theirs", weights, "v2", version=3, tp=4)
    for file in sorted((tmp_path / "theirs").rglob("model_optim_rng.pt")):
        for rank in range(2):
            shard = file.parent.with_name(f"{file.parent.name}_{rank:03d}") / "optim.pt"
            shard.parent.mkdir()
            torch.save({"exp_avg": torch.ones(3)}, shard)
        file.rename(file.with_name("model_rng.pt"))
    words = f"convert {tmp_path}/theirs {tmp_path}/ours --to native --vocab-size 101"
    assert tool("checkpoint").main(words.split()) == 0
    assert "left out: 8 files of a sharded optimizer (optim.pt ...)" in capsys.readouterr().err
    source = open_checkpoint(tmp_path / "ours")
    assert all(torch.equal(source.read(f"model.{name}"), value) for name, value in weights.items())


def test_a_vocabulary_file_of_another_size_is_refused(tmp_path: Path):
    """The conversion refuses a tokenizer of 257 tokens for a model of 101 tokens. If the conversion gets no tokenizer,
    training refuses it."""
    write_byte_vocabulary(tmp_path / "vocab.json", tmp_path / "merges.txt")
    vocabulary = f"--vocab-file {tmp_path}/vocab.json --merge-file {tmp_path}/merges.txt"
    write_megatron(tmp_path / "theirs", random_weights(), "flat", with_args=False)
    folder, main = tmp_path / "ours", tool("checkpoint").main
    convert = f"convert {tmp_path}/theirs {folder} --to native --num-attention-heads 4 --vocab-size 101"
    with pytest.raises(ValueError, match="has 101 tokens, but the tokenizer .*257: give the tokenizer that the model"):
        main(f"{convert} {vocabulary}".split())
    assert not folder.exists() and main(convert.split()) == 0
    for flags, message in (("", "has no tokenizer: give --v"), (vocabulary, "has 101 tokens and the tokenizer 257")):
        with pytest.raises(ValueError, match=message):
            arguments = parse(f"--load {folder} --save {tmp_path}/run --device cpu {flags}".split())
            build_context(arguments, RankInfo(), lambda line: None)
