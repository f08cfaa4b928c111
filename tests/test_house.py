"""The house rules that can be read off the source: who imports whom, and what the training path never does."""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.gpt2.__main__ import PROGRAMS

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("mpu", "data_utils", "megatron")
OURS = {*ROOMS, "tools", "tasks", "scripts", "tests", "benchmarks"}
# `main` is described by its program's docstring; the others are methods whose base class, ours or torch's, says it.
WITHOUT_DOCSTRING = {"main", "forward", "backward", "state_dict", "load_state_dict"}
# The floors of each room, from the lowest: a file or folder imports, of its own room, only from floors below its own.
FLOORS: dict[str, list[str]] = {
    "mpu": [
        "partition kernels",
        "initialize",
        "mappings pipeline grads kv_cache",
        "host_memory",
        "random",
        "layers cross_entropy",
        "attention megatron_2019",
        "transformer",
    ],
    "data_utils": [
        "files command_line worker_processes",
        "indexed_dataset corpora",
        "tokenizers",
        "token_cache preprocessing samplers",
        "gpt2_dataset",
        "splits",
    ],
    "megatron/gpt2": [
        "pipeline",
        "config",
        "monitor model hooks",
        "dist optimizer",
        "checkpoint device",
        "formats",
        "generate",
        "train",
        "commands",
        "extensions",
        "__main__",
    ],
}


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


@functools.cache
def parsed(source: str) -> ast.Module:
    """Read by every rule, changed by none."""
    return ast.parse(source)


def tree_of(path: Path) -> ast.Module:
    return parsed(path.read_text(encoding="utf-8"))


def imported(path: Path) -> set[str]:
    return set(imports(tree_of(path), path))


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


@pytest.mark.parametrize(
    ("room", "friends"),
    [
        ("mpu", {"mpu"}),
        ("data_utils", {"data_utils"}),
        ("megatron", {"mpu", "data_utils", "megatron"}),
        ("tools", {"mpu", "data_utils", "megatron"}),
        ("tasks", {"megatron"}),
    ],
)
def test_rooms_import_only_their_friends(room: str, friends: set[str]) -> None:
    for path in sources(room):
        strangers = roots(imported(path)) & OURS - friends
        assert not strangers, f"{path.relative_to(ROOT)} imports {strangers}"


# torch has no counter-based generator for a CPU, and Triton, which comes with torch's builds for GPUs, is loaded there
# alone. Both are asked for when something is dropped.
OF_PHILOX = {"dropout.py": {"numpy"}, "dropout_triton.py": {"triton"}}


def test_mpu_needs_torch_alone() -> None:
    for path in sources("mpu"):
        allowed = {*sys.stdlib_module_names, "torch", "mpu", *OF_PHILOX.get(path.name, ())}
        strangers = roots(imported(path)) - allowed
        assert not strangers, f"{path.relative_to(ROOT)} imports {strangers}"


def test_data_utils_needs_no_torch() -> None:
    """A rank is a plain integer there."""
    for path in sources("data_utils"):
        assert "torch" not in roots(imported(path)), f"{path.relative_to(ROOT)} imports torch"


@pytest.mark.parametrize("room", ROOMS)
def test_training_imports_torch_numpy_safetensors_alone(room: str) -> None:
    """Of the programs, which may import what they need, this holds for the one that trains."""
    allowed = {*sys.stdlib_module_names, *ROOMS, "torch", "numpy", "safetensors"}
    programs = ROOT / "megatron" / "gpt2" / "commands"
    for path in sources(room):
        if programs in path.parents and path.name != "pretrain_gpt2.py" or path.name == "dropout_triton.py":
            continue
        if "extensions" in path.parts:
            continue
        strangers = roots(imported_at_load(path)) - allowed
        assert not strangers, f"{path.relative_to(ROOT)} imports {strangers} when it is loaded"


def part_of(path: Path, room: str) -> str:
    """The file or the folder directly in `room` that `path` is, or is in, without its suffix."""
    return path.relative_to(ROOT / room).parts[0].removesuffix(".py")


def breaches(room: str, floors: list[str]) -> list[str]:
    """Imports that do not lead downwards, and parts of the room that no floor names."""
    floor_of = {part: number for number, parts in enumerate(floors) for part in parts.split()}
    prefix = room.replace("/", ".") + "."
    found = []
    for path in sources(room):
        here = part_of(path, room)
        if here == "__init__":  # the room's door, above all floors
            continue
        if here not in floor_of:
            found.append(f"{path.relative_to(ROOT)} is on no floor")
            continue
        for name in sorted(imported(path)):
            there = name.removeprefix(prefix).split(".")[0] if name.startswith(prefix) else here
            if there not in floor_of:
                found.append(f"{path.relative_to(ROOT)} imports {name} from the door: import it from its module")
            elif there != here and floor_of[there] >= floor_of[here]:
                found.append(f"{path.relative_to(ROOT)} imports {name}, which is on no floor below it")
    return found


@pytest.mark.parametrize("room", FLOORS)
def test_imports_lead_to_lower_floors(room: str) -> None:
    """So there is no circle of folders."""
    named = {part for parts in FLOORS[room] for part in parts.split()}
    assert named == {part_of(path, room) for path in sources(room)} - {"__init__"}
    assert not breaches(room, FLOORS[room])


def import_graph() -> dict[str, set[str]]:
    """Of each module of ours, those of ours that it imports, functions' own imports included."""
    paths = {module_name(path): path for room in ROOMS for path in sources(room)}
    graph = {}
    for module, path in paths.items():
        reached = set()
        for name in imported(path):
            while name and name not in paths:  # `a.b.function` is in a.b
                name = name.rpartition(".")[0]
            reached |= {name} - {"", module}
        graph[module] = reached
    return graph


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    """Modules to which imports lead from `start`; itself only if there is a circle."""
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        new = graph[waiting.pop()] - seen
        seen |= new
        waiting += new
    return seen


# Files that the training program reaches, imports inside of functions included. It only goes down.
TRAINING_IMPORTS = 87


def test_what_training_imports() -> None:
    """Few enough to be read, and no extension: those are loaded by name, in hooks.py, if a flag asks for one."""
    start = "megatron.gpt2.commands.pretrain_gpt2"
    found = reachable(import_graph(), start) | {start}
    assert not [module for module in found if module.startswith("megatron.gpt2.extensions")]
    assert len(found) <= TRAINING_IMPORTS, sorted(found)


CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
CORE = re.findall(r"^\| \d+ \| `([\w/]+\.py)` \| .+ \|$", CONTRIBUTING, re.MULTILINE)


def test_the_list_of_the_core() -> None:
    """It begins with the entry point and the set-up, and names whatever else of the project its files import."""
    assert CORE[:2] == ["megatron/gpt2/commands/pretrain_gpt2.py", "megatron/gpt2/train/setup.py"]
    assert re.findall(r"^\| (\d+) \| `", CONTRIBUTING, re.MULTILINE) == [str(n + 1) for n in range(len(set(CORE)))]
    graph, file_of = import_graph(), {module_name(path): path for room in ROOMS for path in sources(room)}
    listed = {module_name(ROOT / file) for file in CORE}
    used = {str(file_of[there].relative_to(ROOT)) for here in listed for there in graph[here] - listed}
    named = {
        folder + file
        for folder, text in re.findall(r"^- `([\w/]+/)`: ((?:.+\n)(?:  .+\n)*)", CONTRIBUTING, re.MULTILINE)
        for file in re.findall(r"`([\w/]+\.py)`", text)
    }
    assert len(used) > 20 and named == used, "CONTRIBUTING's list of what else the core uses is not this"


def circles(graph: dict[str, set[str]]) -> list[str]:
    """Modules from which an import leads back to themselves."""
    return sorted(module for module in graph if module in reachable(graph, module))


def test_no_circle_of_files() -> None:
    assert not circles(import_graph())


@pytest.mark.parametrize("room", ROOMS)
def test_no_pickle(room: str) -> None:
    for path in sources(room):
        tree = tree_of(path)
        assert "pickle" not in roots(imported(path)), f"{path.relative_to(ROOT)} imports pickle"
        called = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        bad = called & {"torch.load", "torch.save", "eval", "exec"}
        if path.name in ("megatron.py", "openai.py", "torch_dist.py"):
            bad -= {"torch.save"}  # what it writes are pickles by definition
        assert not bad, f"{path.relative_to(ROOT)} calls {bad}"
        keywords = {(node.arg, ast.unparse(node.value)) for node in ast.walk(tree) if isinstance(node, ast.keyword)}
        bad_keywords = keywords & {("weights_only", "False"), ("allow_pickle", "True")}
        assert not bad_keywords, f"{path.relative_to(ROOT)} passes {bad_keywords}"


def test_megatron_shares_its_name() -> None:
    """NVIDIA's megatron.core lives in the same namespace: see test_packaging.py."""
    lines = (ROOT / "megatron" / "__init__.py").read_text(encoding="utf-8").splitlines()
    assert lines == ['__path__ = __import__("pkgutil").extend_path(__path__, __name__)']


def test_doors_only_open_a_program() -> None:
    """`tasks/` is there for the one name that Megatron v1 and v2 had."""
    assert [path.name for path in (ROOT / "tasks").iterdir() if path.name != "__pycache__"] == ["main.py"]
    for path in (*sources("tools"), *sources("tasks"), *ROOT.glob("*.py")):
        assert imported(path) <= {"sys", "setuptools.setup", "megatron.gpt2.__main__.run"}, path.relative_to(ROOT)
        called = re.findall(r'^    run\("([a-z-]+)"\)$', path.read_text(encoding="utf-8"), re.MULTILINE)
        assert path.name == "setup.py" or len(called) == 1 and called[0] in PROGRAMS, path.relative_to(ROOT)


def public_definitions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    """Functions and classes of a module, and methods of its public classes, whose names have no leading underscore."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    for node in tree.body:
        if isinstance(node, kinds) and not node.name.startswith("_"):
            yield node
            if isinstance(node, ast.ClassDef):
                yield from (inner for inner in node.body if isinstance(inner, kinds) and inner.name[0] != "_")


def without_docstring(path: Path) -> list[str]:
    tree = tree_of(path)
    folders = path.parts[len(ROOT.parts) :]
    layers = "mpu" in folders or "model" in folders  # here forward and backward say what they compute
    exempt = set() if layers else WITHOUT_DOCSTRING
    found = [node.name for node in public_definitions(tree) if node.name not in exempt and not ast.get_docstring(node)]
    return found + ["the module"] * (layers and bool(tree.body) and not ast.get_docstring(tree))


@pytest.mark.parametrize("room", ROOMS)
def test_what_is_public_has_a_docstring(room: str) -> None:
    """But for `main`, whose program says what it does at its top, and what only fills in a method of a base class."""
    without = {path.relative_to(ROOT): names for path in sources(room) if (names := without_docstring(path))}
    assert not without


def test_nothing_is_named_utils() -> None:
    named = [path for room in ROOMS for path in sources(room) if "utils" in path.stem]
    assert not named


def test_the_rules_catch_a_breach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The readers of imports above see every form of import."""
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    path = tmp_path / "mpu" / "inner" / "module.py"
    path.parent.mkdir(parents=True)
    path.write_text("def f(): ...\ndef _g(): ...\nclass C:\n    def forward(self): ...\n    def _n(self): ...\n")
    assert without_docstring(path) == ["f", "C", "forward", "the module"]
    path.write_text(
        "import numpy\nfrom megatron.gpt2 import config\nfrom ..layers import Linear\n"
        "from . import sibling\ndef f():\n    import tqdm\n"
    )
    assert imported(path) == {"numpy", "megatron.gpt2.config", "mpu.layers.Linear", "mpu.inner.sibling", "tqdm"}
    assert imported_at_load(path) == {"numpy", "megatron.gpt2.config", "mpu.layers.Linear", "mpu.inner.sibling"}
    floors = ["layers", "inner"]
    (tmp_path / "mpu" / "layers.py").write_text("")
    assert breaches("mpu", floors) == []
    (tmp_path / "mpu" / "layers.py").write_text("def f():\n    from mpu.inner.module import f\n")
    (tmp_path / "mpu" / "new.py").write_text("")
    assert breaches("mpu", floors) == [
        "mpu/layers.py imports mpu.inner.module.f, which is on no floor below it",
        "mpu/new.py is on no floor",
    ]
    monkeypatch.setitem(globals(), "ROOMS", ("mpu",))
    assert circles(import_graph()) == ["mpu.inner.module", "mpu.layers"]
