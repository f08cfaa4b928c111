"""One shard through one stage: a shard in, outputs and a manifest out, whole or not at all.

    <output>/<name>.jsonl             written by the stage, renamed into place when it is whole and on the disk
    <output>/manifests/<shard>.json   what the outputs were made of and by, written last: without it they do not count

A manifest holds the stage, the parameters, the libraries and the sha256 of the input, how many entries came in, went
out and were dropped, by reason, with samples, and the sha256 of every output. A shard is not run again if its manifest
says all that of today's input and of outputs that are there. Manifests hold no times and no folders: equal input gives
equal bytes.

A document is a dictionary whose "text" is a string that is not empty; "url" or "id" names it. A file of JSON holds one
document a line, a .txt file is one document; both may be compressed.
"""

import argparse
import contextlib
import errno
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, BinaryIO

from data_utils.corpora import (
    HOPELESS_LINES,
    JSON_SUFFIXES,
    MANIFESTS,
    TEXT_SUFFIX,
    files_of,
    json_object,
    open_bytes,
    text_of,
    uncompressed,
)
from data_utils.files import STAGE_MANIFEST_VERSION, add_file, hash_file, replacing

TEXTS_A_SHARD = 10_000
LABEL_CHARACTERS = 100
SAMPLES = 3  # of each reason, kept in a manifest
UNREADABLE = "unreadable"

Document = dict[str, Any]
Progress = Callable[[int], object]  # is called with numbers of bytes that were read


@dataclass(frozen=True)
class Shard:
    """Files that are read, written and begun again together. name: of the output."""

    name: str
    files: tuple[Path, ...]

    @property
    def bytes(self) -> int:
        """The size of all files on the disk."""
        return sum(path.stat().st_size for path in self.files)

    def facts(self) -> dict[str, Any]:
        """The input in a manifest: name, files, bytes and sha256, but not its folder."""
        digest = hashlib.sha256()
        for path in self.files:
            digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
            add_file(digest, path)
        return {"name": self.name, "files": len(self.files), "bytes": self.bytes, "sha256": digest.hexdigest()}


def is_text(path: Path) -> bool:
    """Whether a file's name says that it is one document of plain text, compressed or not."""
    return uncompressed(path.name).endswith(TEXT_SUFFIX)


def stem(path: Path) -> str:
    """The file's name without the suffixes of its compression and its format."""
    name = Path(uncompressed(path.name))
    return name.stem if name.suffix in (*JSON_SUFFIXES, TEXT_SUFFIX) else name.name


def find_files(given: Sequence[str], flag: str = "INPUT") -> tuple[Path, ...]:
    """All files that the entries name, each once, sorted. An entry is a file, a folder or a glob; a folder stands for
    its files with a suffix of JSON or text, without its subfolders. FileNotFoundError names the flag."""
    return tuple(sorted(set(map(Path, files_of(given, flag)))))


def find_shards(given: str, *, join_texts: bool = True) -> list[Shard]:
    """A shard for each file that `given` names; join_texts: one for every 10,000 .txt files. ValueError if two shards
    would write the same output."""
    files = find_files([given])
    texts = [path for path in files if join_texts and is_text(path)]
    shards = [Shard(stem(path), (path,)) for path in files if not (join_texts and is_text(path))]
    for number, first in enumerate(range(0, len(texts), TEXTS_A_SHARD)):
        shards.append(Shard(f"texts_{number:05d}", tuple(texts[first : first + TEXTS_A_SHARD])))
    seen: dict[str, Shard] = {}
    for shard in shards:
        if (other := seen.setdefault(shard.name, shard)) is not shard:
            raise ValueError(f"{other.files[0]} and {shard.files[0]} would both become {shard.name}: rename one")
    return shards


def label(document: Document) -> str:
    """A document's name and first words, for a report."""
    name = document.get("url") or document.get("id")
    words = " ".join(document["text"][: 2 * LABEL_CHARACTERS].split())
    return (f"{name}: {words}" if name else words)[:LABEL_CHARACTERS]


def as_line(document: Any) -> bytes:
    """The document as a line of JSON. Equal documents give equal bytes."""
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode("utf-8") + b"\n"


def parse(path: Path, content: bytes, text_key: str) -> Document:
    """The document in a line, its text under "text", or in a whole .txt file. ValueError or RecursionError if there is
    none."""
    if is_text(path):
        return {"id": path.name, "text": content.decode("utf-8").replace("\r\n", "\n")}
    document = json_object(content)
    text = text_of(document, text_key)
    if text_key != "text":
        document["text"] = document.pop(text_key)
    if b"\\ud" in content.lower():
        as_line({**document, "text": text})  # refuses a lone surrogate, which only an escape can bring
    return document


def read_at(path: Path, offset: int, text_key: str) -> Document:
    """The document whose line begins at `offset` of an uncompressed file."""
    with open(path, "rb") as file:
        file.seek(offset)
        return parse(path, file.readline(), text_key)


@dataclass(frozen=True)
class Stage:
    """`work(run)` does one shard, with the flags `run.args`. A manifest records the flags `recorded`, which decide the
    output, and the versions of `libraries`; it does not record other flags, such as paths and numbers of threads."""

    name: str
    work: Callable[["ShardRun"], None]
    args: argparse.Namespace  # with limit and text_key, as every stage has them
    recorded: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()

    def manifest(self, limit: int | None) -> dict[str, Any]:
        """The part of a manifest that says how its outputs were made. ValueError with the command that installs a
        library that is absent."""
        try:
            versions = {name: metadata.version(name) for name in self.libraries}
        except metadata.PackageNotFoundError as error:
            raise ValueError(
                f"this stage needs {error.name}: python -m pip install -c constraints.txt -e '.[curate]'"
            ) from None
        return {
            "format": STAGE_MANIFEST_VERSION,
            "stage": self.name,
            "parameters": {name: getattr(self.args, name) for name in self.recorded},
            "limit": limit,
            "text_key": self.args.text_key,
            "libraries": versions,
        }


class ShardRun:
    """One shard at work: reads entries, writes or drops each. `limit`: of the entries; `read`: progress."""

    def __init__(
        self,
        args: argparse.Namespace,
        shard: Shard,
        output: Path = Path(),
        limit: int | None = None,
        read: Progress = lambda count: None,
    ) -> None:
        self.args, self.shard, self.output, self.limit = args, shard, output, limit
        self.entered = self.left = 0
        self.dropped: dict[str, dict[str, Any]] = {}
        self._read = read
        self._files: dict[str, BinaryIO] = {}
        self._open = contextlib.ExitStack()

    def _entries(self, whole_texts: bool) -> Iterator[tuple[Path, int, int, bytes]]:
        """(file, line number, offset in the decompressed file, content): each line that is not blank, or a whole .txt
        file. Counts them as entered."""
        for path in self.shard.files:
            whole, offset = whole_texts and is_text(path), 0
            with open_bytes(path) as file:
                for number, content in enumerate([file.read()] if whole else file, 1):
                    self._read(len(content))
                    if whole or content.strip():
                        if self.entered == self.limit:
                            return
                        self.entered += 1
                        yield path, number, offset, content
                    offset += len(content)

    def lines(self) -> Iterator[str]:
        """The lines of the shard that are not empty, without the white space around them."""
        return (content.decode("utf-8", "replace").strip() for *_, content in self._entries(whole_texts=False))

    def documents(self) -> Iterator[Document]:
        """The documents of the shard."""
        return (document for _, document in self.located())

    def located(self) -> Iterator[tuple[int, Document]]:
        """(offset in the decompressed file, document) of each document of the shard. ValueError if all of the first
        thousand are unreadable."""
        for path, number, offset, content in self._entries(whole_texts=True):
            place = f"{path}" if is_text(path) else f"{path}:{number}"
            try:
                document = parse(path, content, self.args.text_key)
            except (ValueError, RecursionError) as error:
                self.drop(UNREADABLE, f"{place}: {error}")
                bad = self.dropped[UNREADABLE]
                if bad["count"] == self.entered == HOPELESS_LINES:  # rather now than after hours
                    raise ValueError(
                        f"{bad['samples'][0]}; and so are all of the first {HOPELESS_LINES} entries"
                    ) from None
                continue
            if document["text"].strip():
                yield offset, document
            else:
                self.drop("empty", place)

    def drop(self, reason: str, what: Document | str) -> None:
        """Count an entry that does not go on; the first ones are kept as samples."""
        entry = self.dropped.setdefault(reason, {"count": 0, "samples": []})
        entry["count"] += 1
        if len(entry["samples"]) < SAMPLES:
            entry["samples"].append(what if isinstance(what, str) else label(what))

    def write(self, document: Document, name: str = "") -> None:
        """A document that goes on, into the output `name` (default: called as the shard)."""
        self.left += 1
        self.file(name or f"{self.shard.name}.jsonl").write(as_line(document))

    def file(self, name: str) -> BinaryIO:
        """An output by its name in the folder; it appears there when the shard is done."""
        if name not in self._files:
            self._files[name] = self._open.enter_context(whole(self.output / name))
        return self._files[name]

    def do(self, work: Callable[["ShardRun"], None]) -> dict[str, Any]:
        """Do the work; then all outputs are on the disk under their names. If it fails, none is. Returns the rest of
        the manifest."""
        with self._open:
            work(self)
            assert self.entered == self.left + sum(entry["count"] for entry in self.dropped.values()), "nothing is lost"
        outputs = [file_facts(self.output, name) for name in self._files]
        return {"entered": self.entered, "left": self.left, "dropped": self.dropped, "outputs": outputs}


def run_shard(
    stage: Stage, shard: Shard, output: Path, limit: int | None = None, read: Progress = lambda count: None
) -> dict[str, Any]:
    """The manifest of the shard's outputs, which are made if they are not there. A failure leaves nothing."""
    path = output / MANIFESTS / f"{shard.name}.json"
    wanted = json.loads(json.dumps({**stage.manifest(limit), "input": shard.facts()}))
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        found = json.loads(path.read_text(encoding="utf-8"))
        names = [entry["name"] for entry in found["outputs"] if (output / entry["name"]).exists()]
        same = {key: found.get(key) for key in wanted} == wanted
        if same and [file_facts(output, name) for name in names] == found["outputs"]:
            read(shard.bytes)
            return found
        path.unlink()
        for name in names:  # of another input or by other parameters: this run may not write these files
            (output / name).unlink()
    try:
        manifest = {**wanted, **ShardRun(stage.args, shard, output, limit, read).do(stage.work)}
        with whole(path) as stream:
            stream.write((json.dumps(manifest, indent=1, ensure_ascii=False) + "\n").encode())
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise OSError(f"{output}: the disk is full: make room, and the same command goes on where it was") from None
        raise
    return manifest


def file_facts(output: Path, name: str) -> dict[str, Any]:
    """An output in a manifest."""
    path = output / name
    return {"name": name, "bytes": path.stat().st_size, "sha256": hash_file(path)}


def whole(path: Path) -> contextlib.AbstractContextManager[BinaryIO]:
    """A file that is open for bytes, and is hidden until the block ends without an error. What a run that was killed
    left is overwritten."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return replacing(path, path.with_name(f".{path.name}.tmp"))
