"""The choice among kernels: by time, kept, the same for all who ask, and never in the way."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import mpu
from mpu import kernel_choice
from mpu.kernel_choice import Kernels, choices_file, fastest
from tests.distributed import run_ranks

FAKE = {"plain": 2.0, "near": 1.95, "fast": 1.0}


def operation() -> Kernels:
    """Three ways that say their name."""
    return Kernels("test_operation", {name: lambda x, name=name: name for name in FAKE})


@pytest.fixture(autouse=True)
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """An empty cache, and a clock that says `FAKE`; which timings were asked for."""
    asked: list[str] = []

    def fake(ways: dict[str, object], arguments: tuple[object, ...]) -> dict[str, float]:
        asked.append(" ".join(ways))
        return dict(FAKE)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("MPU_KERNELS", raising=False)
    monkeypatch.setattr(kernel_choice, "time_ways", fake)
    yield asked
    Kernels.all.pop("test_operation", None)


def choice(kernels: Kernels | None = None) -> str:
    name: str = (kernels or operation()).best(("bf16", 8), lambda: (torch.ones(1),))(1)
    return name


def test_a_later_way_must_be_faster_by_a_margin() -> None:
    assert fastest(FAKE) == "fast"
    assert fastest({"plain": 2.0, "near": 1.95}) == "plain"


def test_it_is_measured_once_and_kept(measured: list[str]) -> None:
    kernels = operation()
    assert [choice(kernels), choice(kernels)] == ["fast", "fast"]
    assert choice() == "fast"  # as another process would
    assert len(measured) == 1
    assert kernels.best(("bf16", 4), lambda: (torch.ones(1),))(1) == "fast"
    assert len(measured) == 2, "another kind is another choice"
    ((machine, kept),) = json.loads(choices_file().read_text()).items()
    assert torch.__version__ in machine and kept["test_operation bf16 8"] == {"chosen": "fast", "ms": FAKE}
    assert [path.name for path in choices_file().parent.iterdir() if path.suffix != ".lock"] == ["kernels.json"]


def test_another_processor_measures_for_itself(measured: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    choice()
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    choice()
    assert len(measured) == 2 and len(json.loads(choices_file().read_text())) == 2


@pytest.mark.parametrize("content", [
    b"", b"{", b"[1]", b"\xff\x00", b"[" * 100_000, b'{"%s": 3}', b'{"%s": {"test_operation bf16 8": 3}}',
    b'{"%s": {"test_operation bf16 8": {"chosen": "gone"}}}', b'{"%s": {"test_operation bf16 8": {"chosen": []}}}'])
def test_a_broken_or_foreign_file_is_replaced(measured: list[str], content: bytes) -> None:
    choices_file().parent.mkdir(parents=True)
    choices_file().write_bytes(content.replace(b"%s", kernel_choice.machine().encode()))
    assert choice() == "fast" and choice() == "fast"
    assert len(measured) == 1
    json.loads(choices_file().read_bytes())


def test_nowhere_to_write(measured: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured anew in each process, without a word: a folder that is a file, one without a name, and no home."""
    (tmp_path / "file").write_text("")
    for place in (str(tmp_path / "file"), "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", place)
        kernels = operation()
        assert choice(kernels) == choice(kernels) == "fast"
    assert choices_file() is None and not Path("relative").exists()
    assert len(measured) == 2


def test_the_variable_decides(measured: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for value, expected in (("first", "plain"), ("test_operation=near", "near"), ("test_operation=near,first", "near"),
                            ("weight_gradient=parts,first", "plain")):
        monkeypatch.setenv("MPU_KERNELS", value)
        assert choice() == expected
    assert not measured and not choices_file().exists()
    for value in ("last", "test_operation=slow", "no_such=plain"):
        monkeypatch.setenv("MPU_KERNELS", value)
        with pytest.raises(ValueError, match=f"^MPU_KERNELS={value}: .*weight_gradient=whole|parts"):
            choice()


def test_nothing_is_measured_inside_a_compiled_region(measured: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = operation()
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert choice(kernels) == "plain" and not measured
    monkeypatch.undo()
    monkeypatch.setenv("MPU_KERNELS", "test_operation=fast")
    assert choice(kernels) == "fast"
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert choice(kernels) == "fast", "what was found before holds"


def chosen_by_rank(rank: int, world_size: int, folder: str) -> str:
    """Every rank would find another way the fastest."""
    mpu.initialize_model_parallel(1)
    names = [*FAKE]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", folder)
        patch.delenv("MPU_KERNELS", raising=False)
        patch.setattr(kernel_choice, "time_ways", lambda ways, arguments: {
            name: 1.0 if names.index(name) == rank else 5.0 for name in ways})
        return choice()


def test_ranks_of_a_machine_agree(tmp_path: Path) -> None:
    assert len(set(run_ranks(chosen_by_rank, 3, str(tmp_path)))) == 1


def test_the_real_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A way that does twenty times the work is not chosen, inside activation checkpointing as well, which counts the
    tensors that are kept."""
    monkeypatch.undo()
    monkeypatch.setenv("MPU_KERNELS", "")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    kernels = Kernels("test_operation", {"twenty": lambda x: sum(x @ x for _ in range(20)), "one": lambda x: x @ x})

    def block(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = kernels.best((), lambda: (torch.ones(64, 64, requires_grad=True),))(x)
        return y

    x = torch.eye(64, requires_grad=True)
    y = mpu.checkpoint(block, x)
    y.sum().backward()
    assert torch.equal(y, torch.eye(64)) and x.grad is not None
