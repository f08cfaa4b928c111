"""The house rules that can be read off the source: who imports whom, and what the training path never does."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("mpu", "data_utils", "megatron")
OURS = {*ROOMS, "tools", "tasks", "scripts", "tests", "benchmarks"}
# Inside mpu a module imports only from floors below its own.
FLOORS = {"kernels": 0, "partition": 0, "initialize": 1, "transformer_config": 1, "mappings": 2, "grads": 2, "data": 2,
          "random": 2, "layers": 3, "cross_entropy": 3, "attention": 4, "transformer": 5, "kv_cache": 1}


def sources(room: str) -> list[Path]:
    found = sorted((ROOT / room).rglob("*.py"))
    assert found, f"{room} holds no Python file"
    return found


def imports(tree: ast.AST, path: Path) -> Iterator[str]:
    """Full dotted names; `from a import b` gives a.b, since b may be a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = path.relative_to(ROOT).parent.parts
                base = ".".join([*package[: len(package) - node.level + 1], *filter(None, [base])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def imported(path: Path) -> set[str]:
    return set(imports(ast.parse(path.read_text(encoding="utf-8")), path))


def roots(names: set[str]) -> set[str]:
    return {name.split(".")[0] for name in names}


def imported_at_load(path: Path) -> set[str]:
    """What importing the module imports: not what stands inside functions or under TYPE_CHECKING."""
    tree = ast.parse(path.read_text(encoding="utf-8"))

    class Strip(ast.NodeTransformer):
        def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
            return None

        visit_AsyncFunctionDef = visit_FunctionDef  # type: ignore[assignment]

        def visit_If(self, node: ast.If) -> ast.AST | None:
            return None if "TYPE_CHECKING" in ast.unparse(node.test) else self.generic_visit(node)

    return set(imports(Strip().visit(tree), path))


@pytest.mark.parametrize(("room", "friends"), [
    ("mpu", {"mpu"}), ("data_utils", {"data_utils"}), ("megatron", {"mpu", "data_utils", "megatron"}),
    ("tools", {"mpu", "data_utils", "megatron"}), ("tasks", {"megatron"})])
def test_rooms_import_only_their_friends(room: str, friends: set[str]) -> None:
    for path in sources(room):
        strangers = roots(imported(path)) & OURS - friends
        assert not strangers, f"{path.relative_to(ROOT)} imports {strangers}"


def test_mpu_needs_torch_alone() -> None:
    for path in sources("mpu"):
        strangers = roots(imported(path)) - set(sys.stdlib_module_names) - {"torch", "mpu"}
        assert not strangers, f"{path.relative_to(ROOT)} imports {strangers}"


def test_data_utils_knows_nothing_of_ranks() -> None:
    for path in sources("data_utils"):
        assert "torch" not in roots(imported(path)), f"{path.relative_to(ROOT)} imports torch"


@pytest.mark.parametrize("room", ROOMS)
def test_training_imports_torch_numpy_safetensors_alone(room: str) -> None:
    """Of the programs, which may import what they need, this holds for the one that trains."""
    allowed = {*sys.stdlib_module_names, *ROOMS, "torch", "numpy", "safetensors"}
    programs = ROOT / "megatron" / "gpt2" / "programs"
    for path in sources(room):
        if programs in path.parents and path.name != "pretrain_gpt2.py":
            continue
        strangers = roots(imported_at_load(path)) - allowed
        assert not strangers, f"{path.relative_to(ROOT)} imports {strangers} when it is loaded"


def test_floors_of_mpu() -> None:
    """Every module and folder of mpu has a floor, and imports only from its own folder and from lower floors."""
    def storey(path: Path) -> str:
        return path.relative_to(ROOT / "mpu").parts[0].removesuffix(".py")

    paths = [path for path in sources("mpu") if path != ROOT / "mpu" / "__init__.py"]
    assert {storey(path) for path in paths} == FLOORS.keys()
    for path in paths:
        for name in imported(path):
            room, _, rest = name.partition(".")
            other = rest.partition(".")[0]
            assert room != "mpu" or other in FLOORS, \
                f"{path.name} imports {name} from mpu itself, which imports {path.name}: import from the module"
            assert room != "mpu" or other == storey(path) or FLOORS[other] < FLOORS[storey(path)], \
                f"{path.name} imports {other}, which is no floor below it"


@pytest.mark.parametrize("room", ROOMS)
def test_no_pickle(room: str) -> None:
    for path in sources(room):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        assert "pickle" not in roots(imported(path)), f"{path.relative_to(ROOT)} imports pickle"
        called = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        bad = called & {"torch.load", "torch.save", "eval", "exec"}
        if path.name == "write_megatron.py":
            bad -= {"torch.save"}  # what it writes are pickles by definition
        assert not bad, f"{path.relative_to(ROOT)} calls {bad}"
        keywords = {(node.arg, ast.unparse(node.value)) for node in ast.walk(tree) if isinstance(node, ast.keyword)}
        bad_keywords = keywords & {("weights_only", "False"), ("allow_pickle", "True")}
        assert not bad_keywords, f"{path.relative_to(ROOT)} passes {bad_keywords}"


def test_megatron_shares_its_name() -> None:
    """NVIDIA's megatron.core lives in the same namespace: see test_packaging.py."""
    lines = (ROOT / "megatron" / "__init__.py").read_text(encoding="utf-8").splitlines()
    assert lines == ['__path__ = __import__("pkgutil").extend_path(__path__, __name__)']


def test_doors_are_of_a_few_lines() -> None:
    """The programs are in megatron/gpt2/programs/; `tasks/` is there for the one name that Megatron v1 and v2 had."""
    assert [path.name for path in (ROOT / "tasks").iterdir() if path.name != "__pycache__"] == ["main.py"]
    for path in (*sources("tools"), *sources("tasks"), *ROOT.glob("*.py")):
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 13, f"{path.relative_to(ROOT)} is no door"
        assert imported(path) - {"sys", "pathlib.Path", "setuptools.setup"} <= {
            f"{module}.cli" for module in programs()}, f"{path.relative_to(ROOT)} imports more than a program"


def programs() -> set[str]:
    """Modules that end with `cli`, by their dotted names."""
    return {".".join(path.relative_to(ROOT).with_suffix("").parts) for room in ("megatron", "data_utils")
            for path in sources(room) if "\ncli = " in path.read_text(encoding="utf-8")}


def test_nothing_is_named_utils() -> None:
    named = [path for room in ROOMS for path in sources(room) if "utils" in path.stem]
    assert not named


def test_the_rules_catch_a_breach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The readers of imports above see every form of import."""
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    path = tmp_path / "mpu" / "inner" / "module.py"
    path.parent.mkdir(parents=True)
    path.write_text("import numpy\nfrom megatron.gpt2 import config\nfrom ..layers import Linear\n"
                    "from . import sibling\ndef f():\n    import tqdm\n")
    assert imported(path) == {"numpy", "megatron.gpt2.config", "mpu.layers.Linear", "mpu.inner.sibling", "tqdm"}
    assert imported_at_load(path) == {"numpy", "megatron.gpt2.config", "mpu.layers.Linear", "mpu.inner.sibling"}
