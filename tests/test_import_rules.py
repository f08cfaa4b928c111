"""Test which packages and libraries the source may import, and that no file reads a pickle."""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from megatron.gpt2.__main__ import PROGRAMS

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("mpu", "data_utils", "megatron")
OURS = {*PACKAGES, "tools", "tasks", "scripts", "tests", "benchmarks"}
# The levels of imports in each package, from the lowest. A file or folder imports only from lower levels of its
# package.
LEVELS: dict[str, list[str]] = {
    "mpu": [
        "partition kernels",
        "initialize",
        "mappings p2p_communication grads kv_cache",
        "activation_offload",
        "random",
        "layers cross_entropy",
        "attention megatron_2019",
        "transformer",
    ],
    "data_utils": [
        "files command_line",
        "indexed_dataset corpora shards",
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


def sources(package: str) -> list[Path]:
    found = sorted((ROOT / package).rglob("*.py"))
    assert found, f"{package} holds no Python file"
    return found


def for_types(node: ast.AST) -> bool:
    """Return whether the node is an `if TYPE_CHECKING:`."""
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def walk(node: ast.AST, functions: bool = True) -> Iterator[ast.AST]:
    """Yield all nodes below `node`, without those under TYPE_CHECKING, which never run.

    functions: whether to yield the nodes in functions, which do not run when the module is loaded.
    """
    for child in ast.iter_child_nodes(node):
        if not for_types(child) and (functions or not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)):
            yield child
            yield from walk(child, functions)


def imports(nodes: Iterable[ast.AST], path: Path) -> Iterator[str]:
    """Yield the full dotted names that `nodes` import. `from a import b` gives a.b, because b may be a module."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = path.relative_to(ROOT).parent.parts
                base = ".".join([*package[: len(package) - node.level + 1], *filter(None, [base])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """Return the syntax tree of a file. The tests share the tree and must not change it."""
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def imported(path: Path) -> set[str]:
    return set(imports(walk(tree_of(path)), path))


def roots(names: set[str]) -> set[str]:
    return {name.split(".")[0] for name in names}


# Only this file imports Triton, which is installed with torch's builds for GPUs.
TRITON = ROOT / "mpu" / "kernels" / "in_triton.py"


def test_packages_import_only_their_allowed_packages() -> None:
    """`data_utils` needs no torch, because a rank is a plain integer there. `mpu` needs only torch, and numpy for
    dropout, because torch has no counter-based generator for a CPU."""
    for path in (path for package in PACKAGES for path in sources(package)):
        package = path.relative_to(ROOT).parts[0]
        if package == "mpu":
            more = {"triton"} if path == TRITON else {"numpy"} if path.name == "dropout.py" else set()
            others = roots(imported(path)) - {*sys.stdlib_module_names, "torch", "mpu", *more}
        else:
            allowed = {"data_utils"} if package == "data_utils" else {*PACKAGES, "torch"}
            others = roots(imported(path)) & {*OURS, "torch"} - allowed
        assert not others, f"{path.relative_to(ROOT)} imports {others}"


def test_training_imports_torch_numpy_safetensors_only() -> None:
    """Files of the training program import only torch, numpy and safetensors when they are loaded. Other programs may
    import other libraries."""
    allowed = {*sys.stdlib_module_names, *PACKAGES, "torch", "numpy", "safetensors"}
    for path in (path for package in PACKAGES for path in sources(package)):
        is_other_program = "commands" in path.parts and path.name != "pretrain_gpt2.py"
        if is_other_program or "extensions" in path.parts or path == TRITON:
            continue
        names = set(imports(walk(tree_of(path), functions=False), path))
        others = (roots(names) - allowed) | {name for name in names if "in_triton" in name}
        assert not others, f"{path.relative_to(ROOT)} imports {others} when it is loaded"


def part_of(path: Path, package: str) -> str:
    """Return the file or folder directly in `package` that contains `path`, without a suffix."""
    return path.relative_to(ROOT / package).parts[0].removesuffix(".py")


@pytest.mark.parametrize("package", LEVELS)
def test_imports_lead_to_lower_levels(package: str) -> None:
    """Each file and folder of the package has a level, and imports only from itself and from lower levels."""
    level_of = {part: number for number, parts in enumerate(LEVELS[package]) for part in parts.split()}
    assert set(level_of) == {part_of(path, package) for path in sources(package)} - {"__init__"}
    prefix = package.replace("/", ".") + "."
    for path in sources(package):
        here = part_of(path, package)
        if here == "__init__":  # An `__init__.py` may import from all levels.
            continue
        for name in (name for name in imported(path) if name.startswith(prefix)):
            there = name.removeprefix(prefix).split(".")[0]
            assert there in level_of, f"{path.relative_to(ROOT)} imports {name} from the package, not from its module"
            assert there == here or level_of[there] < level_of[here], f"{path.relative_to(ROOT)} imports {name}"


def test_the_drawing_of_the_levels() -> None:
    """docs/explanation/architecture.md has the levels in three columns, the highest one at the top."""
    page = (ROOT / "docs/explanation/architecture.md").read_text(encoding="utf-8")
    head, *lines = re.findall(r"^```\n(megatron/gpt2  .+?)^```$", page, re.MULTILINE | re.DOTALL)[0].splitlines()
    starts = [head.index(package) for package in head.split()]
    for package, start, end in zip(head.split(), starts, [*starts[1:], None], strict=True):
        column = [line[start:end].strip().replace(",", "") for line in lines]
        assert [level for level in column if level] == LEVELS[package][::-1]


def import_graph() -> dict[str, set[str]]:
    """Return {module of the project: the modules of the project that it imports, also inside functions}."""
    paths = {module_name(path): path for package in PACKAGES for path in sources(package)}
    graph = {}
    for module, path in paths.items():
        reached = set()
        for name in imported(path):
            while name and name not in paths:  # `a.b.function` is in a.b.
                name = name.rpartition(".")[0]
            reached |= {name} - {"", module}
        graph[module] = reached
    return graph


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    """Return the modules that `start` imports directly or indirectly."""
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        new = graph[waiting.pop()] - seen
        seen |= new
        waiting += new
    return seen


# Training imports at most this number of files, including imports inside functions. TRAINING_IMPORTS may only decrease.
TRAINING_IMPORTS = 90


def test_what_training_imports() -> None:
    """Training imports few files and no extension. No file imports itself indirectly. hooks.py loads an extension only
    if a flag needs that extension."""
    start = "megatron.gpt2.commands.pretrain_gpt2"
    graph = import_graph()
    found = reachable(graph, start) | {start}
    assert not [module for module in found if module.startswith("megatron.gpt2.extensions")]
    assert len(found) <= TRAINING_IMPORTS, sorted(found)
    assert not [module for module in graph if module in reachable(graph, module)], "a cycle of files"


CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
CORE = re.findall(r"^\d+\. `([\w/]+\.py)`: .+$", CONTRIBUTING, re.MULTILINE)


def test_the_list_of_the_core() -> None:
    """CONTRIBUTING's list begins with a training step and its objects, and ends with the start of a run. Below the
    list, CONTRIBUTING names all other files that the listed files import."""
    train = [Path(file).stem for file in CORE if "/train/" in file]
    assert CORE[0] == "megatron/gpt2/train/train_step.py" and train[1:3] == ["trainer", "train_state"]
    assert train[-2:] == ["setup", "loop"]
    assert re.findall(r"^(\d+)\. `", CONTRIBUTING, re.MULTILINE) == [str(n + 1) for n in range(len(set(CORE)))]
    graph, file_of = import_graph(), {module_name(path): path for package in PACKAGES for path in sources(package)}
    listed = {module_name(ROOT / file) for file in CORE}
    used = {str(file_of[there].relative_to(ROOT)) for here in listed for there in graph[here] - listed}
    named = {
        folder + file
        for folder, text in re.findall(r"^- `([\w/]+/)`: ((?:.+\n)(?:  .+\n)*)", CONTRIBUTING, re.MULTILINE)
        for file in re.findall(r"`([\w/]+\.py)`", text)
    }
    assert len(used) > 20 and named == used, "CONTRIBUTING's list of what else the core uses is not this"


def test_no_pickle() -> None:
    for path in (path for package in PACKAGES for path in sources(package)):
        tree = tree_of(path)
        # nanogpt_and_dcp.py writes nanoGPT's meta.pkl. The assertion on `bad` forbids it to read a pickle.
        assert "pickle" not in roots(imported(path)) or path.name == "nanogpt_and_dcp.py", f"{path} imports pickle"
        called = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        bad = called & {"torch.load", "torch.save", "pickle.load", "pickle.loads", "pickle.Unpickler", "eval", "exec"}
        if path.name in ("megatron.py", "nanogpt_and_dcp.py", "torch_dist.py"):
            bad -= {"torch.save"}  # The formats megatron, nanogpt, dcp and torch_dist are pickles.
        assert not bad, f"{path.relative_to(ROOT)} calls {bad}"
        keywords = {(node.arg, ast.unparse(node.value)) for node in ast.walk(tree) if isinstance(node, ast.keyword)}
        bad_keywords = keywords & {("weights_only", "False"), ("allow_pickle", "True")}
        assert not bad_keywords, f"{path.relative_to(ROOT)} passes {bad_keywords}"


def test_entry_points_only_open_a_program() -> None:
    """Each entry point only calls `run` with the name of a program. `tasks/` has only main.py, for command lines of
    Megatron v1 and v2."""
    assert [path.name for path in (ROOT / "tasks").iterdir() if path.name != "__pycache__"] == ["main.py"]
    for path in (*sources("tools"), *sources("tasks"), *ROOT.glob("*.py")):
        if path.name == "checkout.py":  # Other files of its folder import `run` from checkout.py.
            assert imported(path) == {"sys", "pathlib.Path", "megatron.gpt2.__main__.run"}
            continue
        assert imported(path) <= {"sys", "setuptools.setup", "checkout.run", "megatron.gpt2.__main__.run"}, path
        called = re.findall(r'^    run\("([a-z-]+)"\)$', path.read_text(encoding="utf-8"), re.MULTILINE)
        assert path.name == "setup.py" or len(called) == 1 and called[0] in PROGRAMS, path.relative_to(ROOT)
