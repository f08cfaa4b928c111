"""Fixtures and hooks of all tests."""

from __future__ import annotations

import fcntl
import importlib.util
import os
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from types import ModuleType

# torch reads OMP_NUM_THREADS at its import. The ranks that tests start inherit the variable.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

from tests.fork_server import WarmPython

ROOT = Path(__file__).resolve().parents[1]


TEST_DATA = Path(os.environ.get("MEGATRON_TEST_DATA", ROOT.parent / "shared" / "data"))


@pytest.fixture(scope="session")
def test_data() -> Path:
    """Return the folder of real test files: $MEGATRON_TEST_DATA, else ../shared/data."""
    if not TEST_DATA.is_dir():
        pytest.skip(f"{TEST_DATA} is not there; MEGATRON_TEST_DATA names the folder of real test files")
    return TEST_DATA


def needs(*libraries: str, extra: str) -> pytest.MarkDecorator:
    """Return a mark that skips a test if a library is missing. `needs` does not import the library, because each test
    process would then import it at its start."""
    missing = [name for name in libraries if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} of the extra [{extra}] is not installed")


def error_line(call: Callable[[], object]) -> str:
    """Return the text of the ValueError or OSError that `call` raises, which must be one line."""
    with pytest.raises((ValueError, OSError)) as error:
        call()
    assert "\n" not in str(error.value)
    return str(error.value)


def tool(name: str) -> ModuleType:
    """Import the module `name` of megatron.gpt2.commands, which tools/`name`.py starts."""
    return importlib.import_module(f"megatron.gpt2.commands.{name}")


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to a new folder with text.txt, and remove the variables of launchers."""
    from tests.megatron.gpt2.train.training_runs import write_text

    write_text(tmp_path, 1000)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that all test processes of a run of pytest share."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


def made_once(folder: Path, make: Callable[[Path], object]) -> Path:
    """Return `folder`. The first test process that calls `made_once` fills the folder, and the other processes wait."""
    folder.mkdir(exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.with_suffix(".made").exists():
            make(folder)
            folder.with_suffix(".made").touch()
    return folder


@pytest.fixture(scope="session")
def python(shared_folder: Path) -> Iterator[WarmPython]:
    """Return a `WarmPython`: its command `python` forks a process that has torch loaded."""
    server = WarmPython(shared_folder / "python")
    yield server
    server.close()


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """The first test process compiles the modules that all test processes import, and the others wait."""
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
    """Give each test process a share of the longest tests, so that no process is idle at the end. xdist hands out tests
    in equal contiguous parts. The first process begins with its long tests and makes their fixture `reader`, before the
    other processes need the fixture."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    long = [item for item in items if item.name.startswith("test_commands_run_in_the_order_of_each_page")]
    others = [item for item in items if item not in long]
    items.clear()
    for worker in range(workers):
        first, last = (len(others) * number // workers for number in (worker, worker + 1))
        begin = first + (last - first) // 4 * bool(worker)
        items += [*others[first:begin], *long[worker::workers], *others[begin:last]]
