"""The project as others meet it: a wheel in an environment of its own, beside NVIDIA's megatron.core, and with
nothing but torch, numpy and safetensors around."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("mpu", "data_utils", "megatron")
OPTIONAL = (
    "tiktoken",
    "sentencepiece",
    "tokenizers",
    "tqdm",
    "matplotlib",
    "transformers",
    "tensorboard",
    "ftfy",
)
TINY = (
    "--num-layers",
    "1",
    "--hidden-size",
    "16",
    "--num-attention-heads",
    "2",
    "--seq-length",
    "32",
    "--max-position-embeddings",
    "32",
    "--train-iters",
    "2",
    "--device",
    "cpu",
    "--precision",
    "fp32",
)


def run(command: list[str], cwd: Path, timeout: int = 200, **variables: str) -> str:
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    done = subprocess.run(
        command,
        cwd=cwd,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
        env={**environment, "HOME": str(cwd), "XDG_CACHE_HOME": str(cwd / "cache"), **variables},
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: building in place would leave a build/ that the next wheel would pick up."""
    folder = tmp_path_factory.mktemp("wheel")
    for room in ROOMS:
        shutil.copytree(ROOT / room, folder / "source" / room, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, folder / "source")
    run(
        [
            sys.executable,
            *"-m pip wheel --quiet --no-deps --no-build-isolation --no-index --wheel-dir".split(),
            str(folder),
            str(folder / "source"),
        ],
        folder,
    )
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    """The Python of a fresh environment into which pip has put the wheel, and which sees the libraries of this one, but
    not the project's own folder: a .pth file adds the place, and does not follow the .pth files there."""
    folder = wheel.parent / "environment"
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    site = Path(run([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], folder).strip())
    run(
        [
            sys.executable,
            "-m",
            "pip",
            "--python",
            str(python),
            *"install --quiet --no-deps --no-index --no-compile --disable-pip-version-check".split(),
            str(wheel),
        ],
        folder,
    )
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def test_wheel_holds_every_package_and_data_file(wheel: Path) -> None:
    assert wheel.name.startswith("gpt2_model_parallel-")
    names = set(zipfile.ZipFile(wheel).namelist())
    for room in ROOMS:
        files = [
            path.relative_to(ROOT).as_posix()
            for path in (ROOT / room).rglob("*")
            if path.is_file() and path.suffix != ".pyc"
        ]
        assert files
        assert not set(files) - names, "missing in the wheel: see [tool.setuptools] in pyproject.toml"
    tops = {name.split("/")[0] for name in names if not name.split("/")[0].endswith(".dist-info")}
    assert tops == set(ROOMS)


def test_installed_program_trains_outside_the_checkout(installed: Path, tmp_path: Path) -> None:
    output = run(
        [str(installed), "-m", "megatron.pretrain_gpt2", *TINY, *"--eval-iters 1 --log-interval 1".split()], tmp_path
    )
    assert "iteration        2/       2 |" in output
    assert "validation loss at the end of training for val data | LM loss:" in output
    (tracker,) = tmp_path.glob("checkpoints/*/latest_checkpointed_iteration.txt")
    assert tracker.read_text().strip() == "2"
    assert (tracker.parent / "loss.png").exists()


# The packages, then each of the commands that stand in sys.argv, by the functions that the wheel's commands call: one
# start for all.
COMMANDS = """
import shlex, sys
import mpu, data_utils, megatron
from importlib.metadata import distribution
for module in (mpu, data_utils, megatron):
    print(module.__path__[0])
tokenizer = data_utils.build_tokenizer('builtin')
print(tokenizer.decode(list(tokenizer.encode('It was a dark night.'))))
functions = {entry.name: entry.load() for entry in distribution('gpt2-model-parallel').entry_points}
print(*functions)
for line in sys.argv[1:]:
    sys.argv = shlex.split(line)
    try:
        functions[sys.argv[0]]()
    except SystemExit as end:
        assert end.code == 0, line
"""


def test_installed_packages_and_commands_work_outside_the_checkout(installed: Path, tmp_path: Path) -> None:
    """From training on two model-parallel ranks on, by the lines that the run itself prints at its end."""
    commands = {path.name for path in installed.parent.glob("gpt2*")}
    (tmp_path / "text.txt").write_text("It was a dark night. " * 400)
    said = run(
        [
            str(installed.parent / "gpt2-pretrain"),
            *TINY,
            *("--train-data text.txt --eval-iters 1 --nproc-per-node 2 --model-parallel-size 2 --save it").split(),
        ],
        tmp_path,
    )
    printed = re.findall(r"^ +(gpt2 .*)$", said.partition("next:")[2], re.MULTILINE)
    assert [line.split()[1] for line in printed] == ["pretrain", "pretrain", "generate-text", "checkpoint"]
    assert "--nproc-per-node 2" in printed[1] and printed[3] == "gpt2 checkpoint merge it it_merged"
    again = run(
        [
            str(installed),
            "-c",
            COMMANDS,
            printed[3],
            "gpt2-checkpoint inspect it_merged",
            "gpt2 evaluate --load it_merged --valid-data text.txt",
            "gpt2-plan --model 345m --device cpu",
            f"{printed[2]} --max-new-tokens 3",
        ],
        tmp_path,
    ).splitlines()
    paths, text, names, lines = again[:3], again[3], again[4], again[5:]
    assert all(path.startswith(str(installed.parents[1])) for path in paths), paths
    assert text == "It was a dark night."
    assert set(names.split()) == commands and len(commands) >= 14
    for part in ("it_merged", "bits per byte", "354,823,168 in all"):
        assert any(part in line for line in lines), part
    assert any(line.startswith("The ") for line in lines)


def test_training_with_torch_numpy_and_safetensors_alone(tmp_path: Path) -> None:
    """Where nothing else can be imported: byte tokenizer, built-in corpus, the loss curve as text."""
    (tmp_path / "alone.py").write_text(
        f"import sys\nfor name in {OPTIONAL}: sys.modules[name] = None\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "from megatron.gpt2.commands.pretrain_gpt2 import main\nraise SystemExit(main())\n"
    )
    output = run([sys.executable, "alone.py", *TINY, *"--eval-iters 1 --save run".split()], tmp_path)
    assert "iteration        2/       2 |" in output
    assert (tmp_path / "run" / "metrics.jsonl").exists()
    assert not (tmp_path / "run" / "loss.png").exists()
