"""Run one step on one input. The outputs and the manifest of the step are written completely or not at all.

    <output>/<name>.jsonl             written by the step, and renamed when it is complete and on the disk
    <output>/manifests/<input>.json   origin of the outputs, written last; outputs without a manifest are ignored

A manifest contains the step, its parameters, the versions of libraries, the sha256 of the input and of each output, and
the numbers of entries: read, kept, and dropped, by reason and with samples. An input is skipped if its manifest matches
the present files, parameters and outputs (`data_utils.shards`). Manifests contain no times and no folders, so equal
input gives equal bytes.

A document is a dictionary whose "text" is a string that is not empty. Reports name a document by its "url" or "id". A
JSON file contains one document per line, a .txt file is one document. JSON and .txt files may be compressed.
"""

import argparse
import contextlib
import functools
import hashlib
import importlib.metadata
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from data_utils.command_line import missing_package
from data_utils.corpora import (
    JSON_SUFFIXES,
    MANIFESTS,
    MAX_LEADING_BAD_LINES,
    TEXT_SUFFIX,
    expand_paths,
    get_text,
    json_object,
    open_bytes,
    uncompressed,
)
from data_utils.files import STEP_MANIFEST_VERSION, HashingWriter, atomic_write, update_hash
from data_utils.shards import Manifest, disk_full_errors, make_shard

TEXTS_PER_INPUT = 10_000
LABEL_CHARACTERS = 100
SAMPLES = 3  # number of dropped entries that a manifest shows for each reason
UNREADABLE = "unreadable"

Document = dict[str, Any]


@dataclass(frozen=True)
class StepInput:
    """Files that a step processes, and repeats after a failure, together: one JSON file, or up to 10,000 .txt files.

    name: the name of the output.
    """

    name: str
    files: tuple[Path, ...]

    @property
    def bytes(self) -> int:
        """The total number of bytes of the files."""
        return sum(path.stat().st_size for path in self.files)

    def metadata(self) -> dict[str, Any]:
        """Return the entry of a manifest for this input: name, files, bytes and sha256, but not the folder."""
        digest = hashlib.sha256()
        for path in self.files:
            digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
            update_hash(digest, path)
        return {"name": self.name, "files": len(self.files), "bytes": self.bytes, "sha256": digest.hexdigest()}


def is_text(path: Path) -> bool:
    """Return True if `path` names a text file, compressed or not."""
    return uncompressed(path.name).endswith(TEXT_SUFFIX)


def output_name(path: Path) -> str:
    """Return the name of a file without the suffixes of its compression and its format."""
    name = Path(uncompressed(path.name))
    return name.stem if name.suffix in (*JSON_SUFFIXES, TEXT_SUFFIX) else name.name


def find_files(given: Sequence[str], flag: str = "INPUT") -> tuple[Path, ...]:
    """Return all files that the words in `given` name, each once, sorted. A word is a file, a glob or a folder. A
    folder means its JSON and text files without subfolders. Raises FileNotFoundError, which names `flag`."""
    return tuple(sorted(set(map(Path, expand_paths(given, flag)))))


def find_inputs(given: str, *, join_texts: bool = True) -> list[StepInput]:
    """Make an input of each file that `given` names. Raises ValueError if two inputs would write the same output.

    join_texts: make one input of each 10,000 .txt files, instead of one input of each file.
    """
    files = find_files([given])
    texts = [path for path in files if join_texts and is_text(path)]
    sources = [StepInput(output_name(path), (path,)) for path in files if not (join_texts and is_text(path))]
    for number, first in enumerate(range(0, len(texts), TEXTS_PER_INPUT)):
        sources.append(StepInput(f"texts_{number:05d}", tuple(texts[first : first + TEXTS_PER_INPUT])))
    seen: dict[str, StepInput] = {}
    for source in sources:
        if (other := seen.setdefault(source.name, source)) is not source:
            raise ValueError(f"{other.files[0]} and {source.files[0]} would both become {source.name}: rename one")
    return sources


def document_label(document: Document) -> str:
    """Return the name and the first words of a document, for a report."""
    name = document.get("url") or document.get("id")
    words = " ".join(document["text"][: 2 * LABEL_CHARACTERS].split())
    return (f"{name}: {words}" if name else words)[:LABEL_CHARACTERS]


def json_line(document: Any) -> bytes:
    """Return the document as a line of JSON. Equal documents give equal bytes."""
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode("utf-8") + b"\n"


def parse_document(path: Path, content: bytes, text_key: str) -> Document:
    """Parse a document from a line of JSON or a whole .txt file. Move the text of the document to the field "text".
    Raises ValueError if the document has no text."""
    if is_text(path):
        return {"id": path.name, "text": content.decode("utf-8-sig").replace("\r\n", "\n")}
    document = json_object(content)
    text = get_text(document, text_key)
    if text_key != "text":
        document["text"] = document.pop(text_key)
    if b"\\ud" in content.lower():
        # Encoding fails for a lone surrogate, which only an escape such as \ud800 can produce.
        json_line({**document, "text": text})
    return document


def read_at(path: Path, offset: int, text_key: str) -> Document:
    """Read the document whose line begins at `offset` of an uncompressed file."""
    with open(path, "rb") as file:
        file.seek(offset)
        return parse_document(path, file.readline(), text_key)


@dataclass(frozen=True)
class WebtextStep:
    """A step of the preparation of web text, such as download or filter. `work(run)` processes one input with the flags
    `run.args`.

    recorded: the flags that affect the output; a manifest contains their values.
    libraries: packages whose versions affect the output; a manifest contains the versions.
    """

    work: Callable[["StepRun"], None]
    args: argparse.Namespace  # `step_parser` sets `step`, the name, and the flags limit and text_key.
    recorded: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()

    def manifest(self, limit: int | None) -> Manifest:
        """Return the part of a manifest that describes the step. Raises ValueError, with the command to install, if a
        library is missing."""
        try:
            versions = {name: importlib.metadata.version(name) for name in self.libraries}
        except importlib.metadata.PackageNotFoundError as error:
            raise missing_package("this step", error.name, "curate") from None
        return {
            "format": STEP_MANIFEST_VERSION,
            "stage": self.args.step,
            "parameters": {name: getattr(self.args, name) for name in self.recorded},
            "limit": limit,
            "text_key": self.args.text_key,
            "libraries": versions,
        }


class StepRun:
    """A step that runs on one input: it reads entries (documents or URLs), and writes or drops each entry.

    limit: the largest number of entries.
    """

    def __init__(
        self, args: argparse.Namespace, source: StepInput, output: Path = Path(), limit: int | None = None
    ) -> None:
        self.args, self.source, self.output, self.limit = args, source, output, limit
        self.entered = self.left = self.offset = 0
        self.dropped: dict[str, dict[str, Any]] = {}
        self._files: dict[str, HashingWriter] = {}
        self._open = contextlib.ExitStack()

    def _entries(self, whole_texts: bool) -> Iterator[tuple[Path, str, bytes]]:
        """Yield and count entries as (file, "FILE:LINE" for messages, content). An entry is a line that is not blank,
        or a whole .txt file."""
        for path in self.source.files:
            whole, self.offset = whole_texts and is_text(path), 0
            with open_bytes(path) as file:
                for number, content in enumerate([file.read()] if whole else file, 1):
                    if whole or content.strip():
                        if self.entered == self.limit:
                            return
                        self.entered += 1
                        yield path, f"{path}" if whole else f"{path}:{number}", content
                    self.offset += len(content)

    def lines(self) -> Iterator[str]:
        """Yield the lines of the input that are not empty, without white space at both ends."""
        return (content.decode("utf-8-sig", "replace").strip() for *_, content in self._entries(whole_texts=False))

    def documents(self) -> Iterator[Document]:
        """Yield the documents of the input. `offset` is where the current document begins in its decompressed file.
        Raises ValueError if the first thousand documents are all unreadable."""
        for path, place, content in self._entries(whole_texts=True):
            try:
                document = parse_document(path, content, self.args.text_key)
            except ValueError as error:
                self.drop(UNREADABLE, f"{place}: {error}")
                bad = self.dropped[UNREADABLE]
                if bad["count"] == self.entered == MAX_LEADING_BAD_LINES:  # An early error saves hours of reading.
                    raise ValueError(
                        f"{bad['samples'][0]}; all of the first {MAX_LEADING_BAD_LINES} entries are unreadable"
                    ) from None
                continue
            if document["text"].strip():
                yield document
            else:
                self.drop("empty", place)

    def drop(self, reason: str, what: Document | str) -> None:
        """Drop and count an entry. The manifest gets the first SAMPLES entries of each reason."""
        entry = self.dropped.setdefault(reason, {"count": 0, "samples": []})
        entry["count"] += 1
        if len(entry["samples"]) < SAMPLES:
            entry["samples"].append(what if isinstance(what, str) else document_label(what))

    def write(self, document: Document, name: str = "") -> None:
        """Write and count a document.

        name: the name of the output (default: the input's name).
        """
        self.left += 1
        self.file(name or f"{self.source.name}.jsonl").write(json_line(document))

    def file(self, name: str) -> HashingWriter:
        """Open an output. The output appears under `name` in the folder when the input is complete."""
        if name not in self._files:
            self._files[name] = HashingWriter(self._open.enter_context(atomic_file(self.output / name)))
        return self._files[name]

    def run(self, work: Callable[["StepRun"], None]) -> Manifest:
        """Call `work`, then rename all outputs. After a failure, no output appears. Return the counts and output hashes
        for the manifest."""
        with self._open:
            work(self)
            assert self.entered == self.left + sum(entry["count"] for entry in self.dropped.values()), (
                "an entry was neither written nor dropped"
            )
            outputs = {name: [file.chunk()] for name, file in self._files.items()}
        return {"entered": self.entered, "left": self.left, "dropped": self.dropped, "outputs": outputs}


def process_input(step: WebtextStep, source: StepInput, output: Path, limit: int | None = None) -> Manifest:
    """Return the manifest of the input. If the outputs do not exist, make them first. A failure leaves no files."""
    expected = {**step.manifest(limit), "input": source.metadata()}
    write = functools.partial(StepRun(step.args, source, output, limit).run, step.work)
    with disk_full_errors(output):
        return make_shard(output / MANIFESTS / f"{source.name}.json", output, expected, write)


def atomic_file(path: Path) -> contextlib.AbstractContextManager[BinaryIO]:
    """Open a temporary file that is renamed to `path` if the block ends without an error. A temporary file that a
    killed run has left is overwritten."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return atomic_write(path, path.with_name(f".{path.name}.tmp"))
