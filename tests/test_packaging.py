"""Test the installed project: the wheel in a new environment, training with only torch, numpy and safetensors, and an
environment with megatron-core. NVIDIA's megatron-core and this project both install packages below `megatron`, and
Python must find both."""

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

from tests.conftest import ROOT

PACKAGES = ("mpu", "data_utils", "megatron")
OPTIONAL = "tiktoken sentencepiece tokenizers tqdm matplotlib transformers tensorboard ftfy".split()
TINY = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 32 --max-position-embeddings 32 "
    "--train-iters 2 --device cpu --precision fp32"
).split()


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
    """Build the wheel from a copy of the source, because a build leaves a build/ folder, which the next wheel would
    include."""
    folder = tmp_path_factory.mktemp("wheel")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / "source" / package, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, folder / "source")
    line = f"-m pip wheel --quiet --no-deps --no-build-isolation --no-index --wheel-dir {folder} {folder}/source"
    run([sys.executable, *line.split()], folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    """Return the Python of a new environment with the wheel. A .pth file adds the libraries of the current environment,
    but not the project's folder, because Python ignores .pth files in such added folders."""
    python, site = new_environment(wheel.parent / "environment")
    install(python, f"--no-compile --disable-pip-version-check {wheel}", wheel.parent)
    see_libraries(site)
    return python


def new_environment(folder: Path) -> tuple[Path, Path]:
    """Return the Python of a new environment and its folder of packages."""
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    return python, Path(
        run([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], folder).strip()
    )


def install(python: Path, words: str, cwd: Path) -> None:
    run([sys.executable, *f"-m pip --python {python} install --quiet --no-deps --no-index {words}".split()], cwd)


def see_libraries(site: Path) -> None:
    """Let the environment of `site` import the libraries of the current environment."""
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")


def test_wheel_holds_every_package_and_data_file(wheel: Path) -> None:
    assert wheel.name.startswith("gpt2_model_parallel-")
    names = set(zipfile.ZipFile(wheel).namelist())
    for package in PACKAGES:
        files = [
            path.relative_to(ROOT).as_posix()
            for path in (ROOT / package).rglob("*")
            if path.is_file() and path.suffix != ".pyc"
        ]
        assert files
        assert not set(files) - names, "missing in the wheel: see [tool.setuptools] in pyproject.toml"
    tops = {name.split("/")[0] for name in names if not name.split("/")[0].endswith(".dist-info")}
    assert tops == set(PACKAGES)
    ours = {name.split("/")[1].removesuffix(".py") for name in names if name.startswith("megatron/")}
    assert ours == {"__init__", "gpt2", "pretrain_gpt2"}, "no release of NVIDIA has a megatron.gpt2"


# The program imports the packages, then calls the entry point of each command in sys.argv, all in one process.
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
    """Train on two tensor-parallel ranks, then run the commands that the run prints at its end."""
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
    assert [line.split()[1] for line in printed] == ["pretrain", "generate-text", "checkpoint"]
    assert printed[2] == "gpt2 checkpoint merge it it_merged"
    again = run(
        [
            str(installed),
            "-c",
            COMMANDS,
            printed[2],
            "gpt2-checkpoint inspect it_merged",
            "gpt2 evaluate --load it_merged --valid-data text.txt",
            "gpt2-plan --model 345m --device cpu",
            f"{printed[1]} --max-new-tokens 3",
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
    """Without the libraries of OPTIONAL, a run uses the byte tokenizer and the built-in corpus, and writes no
    loss.png."""
    (tmp_path / "alone.py").write_text(
        f"import sys\nfor name in {OPTIONAL}: sys.modules[name] = None\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "from megatron.gpt2.commands.pretrain_gpt2 import main\nraise SystemExit(main())\n"
    )
    output = run([sys.executable, "alone.py", *TINY, *"--eval-iters 0 --save run".split()], tmp_path)
    assert "iteration        2/       2 |" in output
    assert (tmp_path / "run" / "metrics.jsonl").exists()
    assert not (tmp_path / "run" / "loss.png").exists()


# The newest wheel of megatron-core contains the packages `core` and `training`. The tests do not import them, so a
# wheel for any version of Python is fine.
DOWNLOAD = (
    "download megatron-core>=0.17 --quiet --no-deps --only-binary=:all: --python-version 3.12 "
    "--platform manylinux_2_28_x86_64 --platform manylinux_2_24_x86_64"
).split()
# The packages of megatron-core are found but not imported, because they import libraries that need a GPU.
LOOK = """
import importlib.util, sys
import megatron.gpt2.config, megatron.pretrain_gpt2, mpu, data_utils
for name in sys.argv[1:]:
    print(name, importlib.util.find_spec(f"megatron.{name}").origin)
print("ours", megatron.gpt2.config.__file__)
"""


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the unpacked newest wheel of megatron-core."""
    folder = tmp_path_factory.mktemp("theirs")
    try:
        run([sys.executable, "-m", "pip", *DOWNLOAD, "--dest", str(folder)], folder)
    except AssertionError as error:
        pytest.skip(f"the package index gives no wheel of megatron-core: {error}")
    (built,) = folder.glob("*.whl")
    unpack(built, folder / "site")
    assert (folder / "site" / "megatron" / "training").is_dir()
    return folder / "site"


def check_found(python: Path | str, cwd: Path, theirs: Path, ours: Path, path: str = "") -> None:
    """Check that `python` finds megatron.core and megatron.training in the folder `theirs`, and megatron.gpt2.config in
    the folder `ours`."""
    found = run([str(python), "-c", LOOK, "core", "training"], cwd, PYTHONPATH=path).splitlines()
    files = [f"{name} {theirs}/megatron/{name}/__init__.py" for name in ("core", "training")]
    assert found == [*files, f"ours {ours}/megatron/gpt2/config/__init__.py"]


def unpack(wheel: Path, site: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)


@pytest.mark.parametrize(
    "way", ["path", pytest.param("wheels", marks=pytest.mark.wide), pytest.param("editable", marks=pytest.mark.wide)]
)
def test_ours_and_theirs_are_both_found(wheel: Path, theirs: Path, tmp_path: Path, way: str):
    """NVIDIA's and our packages are in sys.path or in one site-packages folder, and neither overwrites files of the
    other. `editable` is pip install -r requirements.txt, which finds our packages by a hook, after sys.path."""
    if way == "path":
        check_found(sys.executable, tmp_path, theirs, ROOT, f"{theirs}:{ROOT}")
        return
    python, site = new_environment(tmp_path / "environment")
    see_libraries(site)
    their_wheel = next(theirs.parent.glob("*.whl"))
    unpack(their_wheel, site)
    source = wheel.parent / "source"
    if way == "wheels":
        assert not {*zipfile.ZipFile(wheel).namelist()} & {*zipfile.ZipFile(their_wheel).namelist()}
        unpack(wheel, site)
    else:
        install(python, "--no-build-isolation -r requirements.txt", source)
    check_found(python, tmp_path, site, source if way == "editable" else site)
