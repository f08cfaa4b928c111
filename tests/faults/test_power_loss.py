"""Test power losses at any moment: a run continues from its last committed checkpoint and has all records up to this
checkpoint, and preprocessing makes the same pair of files.

strace records the system calls of a program in a folder. The test then makes every state of the disk that POSIX allows.
fsync of a file puts the file's data on the disk, and fsync of a folder puts the folder's entries there. Every other
change may be on the disk or not, in any order. A rename is atomic.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import itertools
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from data_utils.files import append_line, make_folder
from data_utils.indexed_dataset import IndexedDataset, read_manifest
from data_utils.preprocessing import PreprocessingJob, preprocess
from data_utils.tokenizers import load_tokenizer
from megatron.gpt2.checkpoint.local import LocalCheckpoints, assemble_local_checkpoint
from megatron.gpt2.checkpoint.save_folder import find_checkpoint
from megatron.gpt2.checkpoint.saver import Saver
from megatron.gpt2.commands import pretrain_gpt2
from megatron.gpt2.dist.ranks import RankInfo
from megatron.gpt2.monitor.html_report import HISTORY, METRICS
from megatron.gpt2.monitor.incidents import read_records
from tests.conftest import ROOT
from tests.megatron.gpt2.checkpoint.saved_states import find, save
from tests.megatron.gpt2.train.training_runs import SMALL, write_text

UNREAD = re.compile(r".*\.tmp|save/(lease|incidents|report|samples)")  # files that no check reads
CALLS = "openat,write,fsync,mkdir,rmdir,unlink,unlinkat,rename"
ARGUMENT = re.compile(r'<((?:\\x..)+)>|"((?:\\x..)*)"')  # the path of a file descriptor, or a string argument
TEXT = ROOT / "LICENSE"
MARK = "mark"  # A write to this file marks that everything before is committed.
ALLOW_ANY_TRACER = 0x59616D61, ctypes.c_ulong(2**64 - 1)


@dataclass(frozen=True)
class Call:
    """A system call.

    paths: paths in the folder, two for a rename.
    data: the bytes that the call writes.
    text: the line of the call in strace's output.
    """

    name: str
    paths: list[str]
    data: bytes
    text: str


def record(make: Callable[[Path], None], folder: Path) -> list[Call]:
    """Call `make` with `folder`. Return the system calls on files in `folder` that strace recorded."""
    if not shutil.which("strace"):
        pytest.skip("strace is not installed")
    output = folder.with_suffix(".strace")
    ctypes.CDLL(None).prctl(*ALLOW_ANY_TRACER)  # PR_SET_PTRACER, PR_SET_PTRACER_ANY
    flags = f"-f -y -xx -s 99999999 -e trace={CALLS} -p {os.getpid()} -o".split()
    with subprocess.Popen(["strace", *flags, f"{output}"], stderr=subprocess.PIPE, text=True) as strace:
        if "attached" not in (said := strace.stderr.readline()):
            pytest.skip(f"strace cannot trace a process here: {said.strip()}")
        try:
            make(folder)
        finally:
            strace.terminate()
    return list(parse(output.read_text(), f"{folder}/"))


def parse(output: str, folder: str) -> Iterator[Call]:
    """Yield the successful system calls that change or sync files of `folder`, in the order in which they end."""
    begun: dict[str, str] = {}
    for line in output.splitlines():
        process, text = line.split(None, 1)
        if text.endswith("<unfinished ...>"):
            begun[process] = text.removesuffix("<unfinished ...>")
            continue
        if text.startswith("<..."):
            text = begun.pop(process) + text.partition("resumed>")[2]
        name, arguments = text.partition("(")[0], text.rpartition(" = ")[0]
        if " = -1 " in text or name == "openat" and "O_CREAT" not in text:
            continue
        values = [bytes.fromhex("".join(found).replace("\\x", "")) for found in ARGUMENT.findall(arguments)]
        paths = [os.fsdecode(value) for value in values]
        if name in ("write", "fsync"):
            paths = paths[:1]
        elif "at" in name:  # Calls such as renameat have a folder and a name for each path.
            paths = [os.path.join(*pair) for pair in zip(paths[::2], paths[1::2], strict=True)]
        if paths and all(f"{path}/".startswith(folder) for path in paths):
            yield Call(name, [path[len(folder) :] for path in paths], values[-1], text)


@dataclass(eq=False)
class Node:
    """A file (bytes) or a folder ({name: Node}).

    content: the state that programs see.
    synced: the state that is on the disk after any power loss.
    """

    content: Any
    synced: Any

    def possible_data(self) -> list[bytes]:
        """Return the possible contents of a file on the disk: with all new bytes, with none, with half of them, or with
        zeros instead of them."""
        new, kept = self.content, len(self.synced) if self.content.startswith(self.synced) else 0
        return [new, self.synced, new[: (kept + len(new)) // 2], new[:kept].ljust(len(new), b"\0")]


# Changed entries of folders: (folder, name, the new node or None). A sync of the first folder puts the changes on the
# disk.
Change = tuple[tuple[Node, str, Node | None], ...]
Tree = dict[str, bytes | None]  # the data of each path; None stands for a folder


def apply(change: Change, entries_of: Callable[[Node], dict[str, Node]]) -> None:
    for folder, name, node in change:
        entries_of(folder).pop(name, None)
        if node is not None:
            entries_of(folder)[name] = node


class Disk:
    """An empty folder on which system calls are replayed.

    events: the texts that were written to MARK.
    """

    def __init__(self) -> None:
        self._root, self.events = Node({}, {}), list[str]()
        self._pending: list[Change] = []  # changes, in order, that may not be on the disk yet

    def _find(self, path: str) -> tuple[Node, str, Node | None]:
        """Return the folder that contains `path`, the name of `path` in this folder, and the `Node` at `path`, or None
        if there is no such file or folder."""
        *folders, name = path.split("/")
        folder = functools.reduce(lambda node, part: node.content[part], folders, self._root)
        return folder, name, folder.content.get(name) if name else folder

    def replay(self, call: Call) -> None:
        (folder, name, node), *target = map(self._find, call.paths)
        change: Change = ((folder, name, None),)
        if call.name == "write":
            if name == MARK:
                self.events.append(call.data.decode())
            elif node is not None:  # The traced programs only append to files.
                node.content += call.data
        elif call.name == "fsync":
            self._sync(node)
        elif call.name == "openat" and node is not None:
            node.content = b"" if "O_TRUNC" in call.text else node.content
        elif name != MARK:
            if call.name in ("openat", "mkdir"):
                change = ((folder, name, Node(b"", b"") if call.name == "openat" else Node({}, {})),)
            elif target:
                change = ((*target[0][:2], node), *change)
            self._pending.append(change)
            apply(change, lambda folder: folder.content)

    def _sync(self, node: Node) -> None:
        if isinstance(node.content, bytes):
            node.synced = node.content
        for change in self._pending:
            if change[0][0] is node:
                apply(change, lambda folder: folder.synced)
        reachable = set(self._reachable())
        self._pending = [change for change in self._pending if change[0][0] in reachable - {node}]

    def _reachable(self) -> Iterator[Node]:
        """Yield the files and folders that may exist after a power loss. Some are yielded twice."""
        nodes, seen = [self._root], set[Node]()
        for node in nodes:
            yield node
            if isinstance(node.content, dict) and node not in seen:
                seen.add(node)
                new = (found for change in self._pending for folder, _, found in change if folder is node and found)
                nodes += [*node.synced.values(), *new]

    def states(self, together: int) -> Iterator[Tree]:
        """Yield the possible contents of the disk: with all unsynced changes or with none, except for up to `together`
        changes."""
        files = {node for node in self._reachable() if isinstance(node.content, bytes) and node.content != node.synced}
        units: list[Any] = [*self._pending, *files]
        for is_kept in (True, False):
            for count in range(together + 1):
                for chosen in itertools.combinations(units, count):
                    ways = (unit.possible_data() if unit in files else [not is_kept] for unit in chosen)
                    for way in itertools.product(*ways):
                        yield self._tree(dict(zip(chosen, way, strict=True)), is_kept)

    def _tree(self, chosen: dict[Any, Any], is_kept: bool) -> Tree:
        entries: dict[Node, dict[str, Node]] = {}

        def entries_of(folder: Node) -> dict[str, Node]:
            return entries.setdefault(folder, dict(folder.synced))

        for change in self._pending:
            if chosen.get(change, is_kept):
                apply(change, entries_of)
        tree: Tree = {}
        folders = [("", self._root)]
        for path, folder in folders:
            for name, node in entries_of(folder).items():
                if isinstance(node.content, dict):
                    tree[path + name] = None
                    folders.append((f"{path}{name}/", node))
                else:
                    tree[path + name] = chosen.get(node, node.content if is_kept else node.synced)
        return tree


def save_as_two_ranks(folder: Path) -> None:
    """Save three iterations, the last iteration twice, and remove old checkpoints."""
    make_folder(folder / "save")  # A run also makes this folder.
    for iteration, keep_last in ((100, 2), (200, 2), (200, 2), (300, 1)):
        save(folder / "save", iteration, keep_last=keep_last)
        append_line(folder / MARK, f"{iteration}")


def check_two_ranks(folder: Path, events: Sequence[str]) -> None:
    iteration, _ = find(folder / "save")  # `find` compares all values.
    assert (iteration or 0) >= max(map(int, events), default=0)


def train(folder: Path, words: str) -> None:
    """Train. Save a checkpoint after every second iteration, and a local checkpoint after the other iterations."""
    write_text(folder.parent, 1000)

    def marked(method: Callable[..., object]) -> Callable[..., object]:
        def save_and_mark(owner: object, iteration: int, *args: object, **kwargs: object) -> object:
            result = method(owner, iteration, *args, **kwargs)
            append_line(folder / MARK, f"{iteration}")
            return result

        return save_and_mark

    flags = (
        f"--train-data {folder.parent}/text.txt --data-cache-path {folder.parent}/cache --save {folder}/save "
        f"--local-checkpoint-dir {folder}/local --local-checkpoint-interval 1 --save-interval 2 --keep-last 1 "
        "--log-interval 1 --num-layers 1 --hidden-size 8 --num-attention-heads 1"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Saver, "write", marked(Saver.write))
        patch.setattr(LocalCheckpoints, "save", marked(LocalCheckpoints.save))
        assert pretrain_gpt2.main([*SMALL, *flags.split(), *words.split()]) == 0


def check_training(folder: Path, events: Sequence[str]) -> None:
    where, logged = folder / "save", list[str]()
    checkpoint = find_checkpoint(where, log=logged.append)
    newest, rank = checkpoint.iteration if checkpoint else 0, RankInfo(0, 1, 0, 1)
    if local := assemble_local_checkpoint(str(where), f"{folder}/local", newest, rank, logged.append):
        checkpoint = find_checkpoint(local, log=pytest.fail)
    iteration = checkpoint.iteration if checkpoint else 0
    assert iteration >= max(map(int, events), default=0), logged
    if iteration:
        assert json.loads((where / "config.json").read_bytes()) and load_tokenizer(where / "tokenizer")
    for name, covered in ((METRICS, list(range(1, iteration + 1))), (HISTORY, [0])) if iteration else ():
        # A new record must be readable, even if the file ends in an incomplete line.
        append_line(where / name, json.dumps({"iteration": -1}))
        *found, last = (record["iteration"] for record in read_records(where / name))
        assert found[: len(covered)] == covered and last == -1


def make_pair(folder: Path) -> None:
    options: dict[str, Any] = {"keys": ("text",), "tokenizer": (("kind", "bytes"),)}
    preprocess(PreprocessingJob((str(TEXT),), f"{folder}/new/pair", **options), log=lambda line: None)
    append_line(folder / MARK, "made")


def check_pair(folder: Path, events: Sequence[str]) -> None:
    """Check the pair of token files, if it is on the disk. Preprocess again, and check the pair again."""
    prefix = f"{folder}/new/pair_text_document"
    for committed in (events, ["made"]):
        assert Path(f"{prefix}.idx").exists() or not committed
        if Path(f"{prefix}.idx").exists():
            assert IndexedDataset(prefix).tokens.astype("u1").tobytes() == TEXT.read_bytes()
            assert read_manifest(prefix)
        make_pair(folder)


def without(calls: list[Call], pattern: str) -> list[Call]:
    """Return `calls` without the syncs of paths that match `pattern`."""
    return [call for call in calls if call.name != "fsync" or not re.fullmatch(pattern, call.paths[0])]


def rename_first(calls: list[Call], pattern: str) -> list[Call]:
    """Return `calls`, with the rename of the file that matches `pattern` before the sync of this file."""
    number = next(number for number, call in enumerate(calls) if not without([call], pattern))
    before, sync, after = calls[:number], calls[number], calls[number + 1 :]
    rename = next(call for call in after if call.paths[0] == sync.paths[0] and call.name == "rename")
    after.remove(rename)
    return [*before, rename, dataclasses.replace(sync, paths=rename.paths[1:]), *after]


RENAMED_FIRST = r".*merged_text\.idx"
# Planted faults: patterns of the files and folders that a program does not sync, or renames before the sync.
FAULTS: dict[Any, list[str]] = {
    check_two_ranks: [
        r".*/mp_rank_01/optim_dp_00\.safetensors",
        r".*/rank_00001\.jsonl\.tmp",
        r".*/manifest\.json\.tmp",
        ".*/mp_rank_01",
        "save/iter_[^/]*",
        "save",
    ],
    check_training: [
        "save/tokenizer",
        r"save/metrics\.jsonl",
        r"save/history\.jsonl",
        "local/[^/]*/iter_[^/]*",
        "local",
    ],
    check_pair: [r".*merged_text\.bin", "new", RENAMED_FIRST],
}
wide = pytest.mark.wide


@pytest.mark.parametrize(
    "make, check, together, all_files",
    [
        (save_as_two_ranks, check_two_ranks, 1, False),
        (make_pair, check_pair, 1, False),
        (functools.partial(train, words="--train-iters 2"), check_training, 1, False),
        pytest.param(save_as_two_ranks, check_two_ranks, 1, True, marks=wide),
        pytest.param(make_pair, check_pair, 2, True, marks=wide),
        pytest.param(functools.partial(train, words="--train-iters 5"), check_training, 1, True, marks=wide),
        pytest.param(
            functools.partial(train, words="--train-iters 5 --async-save"), check_training, 2, False, marks=wide
        ),
    ],
)
def test_no_state_is_lost_and_each_fault_is_found(
    make: Callable[[Path], None],
    check: Callable[[Path, Sequence[str]], None],
    together: int,
    all_files: bool,
    tmp_path: Path,
) -> None:
    """check: raises an error if a folder has lost state of the given commits.
    together: the argument of `Disk.states`.
    all_files: whether to check states that differ only in the files of `UNREAD`.
    """
    folder, state, seen = tmp_path / "disk", tmp_path / "state", set[Any]()
    folder.mkdir()
    calls = record(make, folder)

    def lost(calls: list[Call], seen: set[Any]) -> Iterator[str]:
        """Check each state of the disk that is not in `seen`, and add the state to `seen`. Yield the errors."""
        disk = Disk()
        for call in calls:
            disk.replay(call)
            for tree in disk.states(together):
                key = (
                    len(disk.events),
                    frozenset(item for item in tree.items() if all_files or not UNREAD.match(item[0])),
                )
                if key in seen:
                    continue
                seen.add(key)
                shutil.rmtree(state, ignore_errors=True)
                state.mkdir()
                for path, data in tree.items():  # A folder precedes its entries in `tree`.
                    (state / path).mkdir() if data is None else (state / path).write_bytes(data)
                try:
                    check(state, disk.events)
                except Exception as error:
                    yield f"after {disk.events}: {type(error).__name__}: {error}"

    disk = Disk()
    for call in calls:
        disk.replay(call)
    (folder / MARK).unlink()
    assert next(disk.states(0)) == {
        f"{path.relative_to(folder)}": None if path.is_dir() else path.read_bytes() for path in folder.rglob("*")
    }, "a call was not recorded"
    assert not list(itertools.islice(lost(calls, seen), 9))
    print(f"{len(seen)} states of the disk, none lost")
    for pattern in FAULTS[check]:
        planted = (rename_first if pattern == RENAMED_FIRST else without)(calls, pattern)
        assert planted != calls and any(lost(planted, set(seen))), pattern
