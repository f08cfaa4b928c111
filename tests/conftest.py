"""What every test shares."""

from __future__ import annotations

import fcntl
import importlib.util
import os
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from types import ModuleType

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; ranks that tests start inherit it

import pytest

from tests.warm_python import WarmPython

ROOT = Path(__file__).resolve().parents[1]


TEST_DATA = Path(os.environ.get("MEGATRON_TEST_DATA", ROOT.parent / "shared" / "data"))


@pytest.fixture(scope="session")
def test_data() -> Path:
    """The folder of real test files: $MEGATRON_TEST_DATA, else shared/data beside the project's folder."""
    if not TEST_DATA.is_dir():
        pytest.skip(f"{TEST_DATA} is not there; MEGATRON_TEST_DATA names the folder of real test files")
    return TEST_DATA


def needs(*libraries: str, extra: str) -> pytest.MarkDecorator:
    """The mark of tests that skip where a library is missing. It imports none: each of the test processes would, also
    those that run none of these tests."""
    missing = [name for name in libraries if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} of the extra [{extra}] is not installed")


def tool(name: str) -> ModuleType:
    """The program behind tools/`name`.py, imported by the test that runs it."""
    return importlib.import_module(f"megatron.gpt2.commands.{name}")


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of all the test processes of this run."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


def made_once(folder: Path, make: Callable[[Path], object]) -> Path:
    """`folder`, filled by the first of the test processes that comes here; the others wait for it."""
    folder.mkdir(exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.with_suffix(".made").exists():
            make(folder)
            folder.with_suffix(".made").touch()
    return folder


@pytest.fixture(scope="session")
def python(shared_folder: Path) -> Iterator[WarmPython]:
    """A `python` that starts in no time, for tests in which the start is not the point."""
    server = WarmPython(shared_folder / "python")
    yield server
    server.close()


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """The first of the test processes compiles what all of them import, libraries too; the others wait for it. At the
    same time each of them would compile it all."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return (yield)
    folder = Path(session.config.option.basetemp).parent
    with (folder / "collection.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "collection.made").exists():
            collected = yield
            (folder / "collection.made").touch()
            return collected
    return (yield)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first: with two workers nobody waits for it at the end."""
    items.sort(key=lambda item: not item.name.startswith("test_commands_run_in_the_order_of_each_page"))
