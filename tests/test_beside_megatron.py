"""Our package beside NVIDIA's, which share the name `megatron`: both are found, whichever was installed first."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.test_packaging import run, wheel

__all__ = ["wheel"]  # the fixture

# What stands directly under megatron/ in NVIDIA's wheels and repository, of today and of earlier releases.
THEIRS = {
    "core",
    "training",
    "inference",
    "legacy",
    "post_training",
    "rl",
    "elastification",
    "bridge",
    "energon",
    "model",
    "mpu",
    "data",
    "fp16",
    "optimizer",
    "tokenizer",
    "text_generation",
    "fused_kernels",
    "schedules",
    "arguments",
    "checkpointing",
    "global_vars",
    "initialize",
    "learning_rates",
    "memory",
    "microbatches",
    "p2p_communication",
    "utils",
    "fp16_deprecated",
    "timers",
    "dist_signal_handler",
    "log_handler",
    "optimizer_param_scheduler",
    "text_generation_server",
    "theoretical_memory_usage",
    "testing_utils",
}
# The newest of their wheels has `training` beside `core`. Which Python it was built for does not matter here.
DOWNLOAD = (
    "download",
    "megatron-core>=0.17",
    "--quiet",
    "--no-deps",
    "--only-binary=:all:",
    "--python-version",
    "3.12",
    "--platform",
    "manylinux_2_28_x86_64",
    "--platform",
    "manylinux_2_24_x86_64",
)
# Their packages are found, not run: they import what a machine without a GPU lacks.
LOOK = """
import importlib.util, sys
import megatron.gpt2.config, megatron.pretrain_gpt2, mpu, data_utils
for name in sys.argv[1:]:
    print(name, importlib.util.find_spec(f"megatron.{name}").origin)
print("ours", megatron.gpt2.config.__file__)
"""


def test_no_module_of_ours_has_a_name_of_theirs():
    ours = {path.stem for path in (ROOT / "megatron").iterdir()} - {"__init__", "__pycache__"}
    assert ours == {"gpt2", "pretrain_gpt2"}
    assert not ours & THEIRS


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with NVIDIA's newest wheel, unpacked."""
    folder = tmp_path_factory.mktemp("theirs")
    done = subprocess.run(
        [sys.executable, "-m", "pip", *DOWNLOAD, "--dest", str(folder)],
        text=True,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=240,
    )
    if done.returncode != 0:
        pytest.skip(f"the package index gives no wheel of megatron-core: {done.stdout.strip().splitlines()[-1]}")
    (built,) = folder.glob("*.whl")
    with zipfile.ZipFile(built) as archive:
        archive.extractall(folder / "site")
    assert (folder / "site" / "megatron" / "training").is_dir()
    return folder / "site"


def look(python: Path | str, cwd: Path, *path: Path) -> dict[str, Path]:
    """Where an interpreter finds core and training of theirs, and our config."""
    lines = run(
        [str(python), "-c", LOOK, "core", "training"], cwd, PYTHONPATH=os.pathsep.join(map(str, path))
    ).splitlines()
    return {name: Path(file) for name, _, file in (line.partition(" ") for line in lines)}


@pytest.mark.parametrize("ours_first", [pytest.param(True, marks=pytest.mark.wide), False])
def test_on_the_path(theirs: Path, tmp_path: Path, ours_first: bool):
    """As where a checkout of theirs stands before or behind ours."""
    found = look(sys.executable, tmp_path, *((ROOT, theirs) if ours_first else (theirs, ROOT)))
    assert found == {
        "core": theirs / "megatron" / "core" / "__init__.py",
        "training": theirs / "megatron" / "training" / "__init__.py",
        "ours": ROOT / "megatron" / "gpt2" / "config" / "__init__.py",
    }


def environment(folder: Path) -> tuple[Path, Path]:
    """The Python of a new environment that sees the libraries of this one, and where its packages go."""
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    site = Path(run([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], folder).strip())
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python, site


def unpack(wheel: Path, site: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)


@pytest.mark.parametrize("ours_first", [True, pytest.param(False, marks=pytest.mark.wide)])
def test_installed_as_wheels(wheel: Path, theirs: Path, tmp_path: Path, ours_first: bool):
    """Both in one site-packages: neither overwrites a file of the other."""
    python, site = environment(tmp_path / "environment")
    wheels = [wheel, next(theirs.parent.glob("*.whl"))]
    for one in wheels if ours_first else wheels[::-1]:
        unpack(one, site)
    found = look(python, tmp_path)
    assert found == {
        "core": site / "megatron" / "core" / "__init__.py",
        "training": site / "megatron" / "training" / "__init__.py",
        "ours": site / "megatron" / "gpt2" / "config" / "__init__.py",
    }


@pytest.mark.wide
def test_ours_editable(wheel: Path, theirs: Path, tmp_path: Path):
    """pip install -e finds our packages by a hook, after the folders of sys.path."""
    python, site = environment(tmp_path / "environment")
    unpack(next(theirs.parent.glob("*.whl")), site)
    source = wheel.parent / "source"
    run(
        [
            sys.executable,
            "-m",
            "pip",
            "--python",
            str(python),
            *"install --quiet --no-deps --no-build-isolation --no-index -e".split(),
            str(source),
        ],
        tmp_path,
    )
    found = look(python, tmp_path)
    assert found == {
        "core": site / "megatron" / "core" / "__init__.py",
        "training": site / "megatron" / "training" / "__init__.py",
        "ours": source / "megatron" / "gpt2" / "config" / "__init__.py",
    }
