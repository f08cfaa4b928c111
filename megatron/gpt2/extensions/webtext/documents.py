"""What a stage reads: shards of documents out of a file, a folder or a glob.

A document is a dictionary whose "text" is a string that is not empty; "url" or "id" names it where there is one. JSON
holds one a line, a .txt file is one; both may be compressed.
"""

import glob
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_utils.corpora.documents import JSON_SUFFIXES, TEXT_SUFFIX, documents_in, open_bytes, uncompressed
from data_utils.files import add_file

TEXTS_A_SHARD = 10_000
LABEL_CHARACTERS = 100

Document = dict[str, Any]
Skip = Callable[[str, str], None]  # reason, sample


@dataclass(frozen=True)
class Shard:
    """Files that are read, written and begun again together. name: of the output."""

    name: str
    files: tuple[Path, ...]

    @property
    def bytes(self) -> int:
        """Of all files together, as they lie on the disk."""
        return sum(path.stat().st_size for path in self.files)

    def facts(self) -> dict[str, Any]:
        """What a manifest says of the input: name, files, bytes and sha256, but not its folder."""
        digest = hashlib.sha256()
        for path in self.files:
            digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
            add_file(digest, path)
        return {"name": self.name, "files": len(self.files), "bytes": self.bytes, "sha256": digest.hexdigest()}


def stem(path: Path) -> str:
    """The file's name without the suffixes of its compression and its format."""
    name = uncompressed(path.name)
    return next((name.removesuffix(suffix) for suffix in (*JSON_SUFFIXES, TEXT_SUFFIX) if name.endswith(suffix)), name)


def is_text(path: Path) -> bool:
    """Whether a file's name says that it is one document of plain text, compressed or not."""
    return uncompressed(path.name).endswith(TEXT_SUFFIX)


def find_files(given: Sequence[str]) -> list[Path]:
    """All files that the entries name, sorted. An entry is a file, a folder or a glob. Of a folder it is the files with
    a suffix of JSON or text, without its subfolders. FileNotFoundError where an entry names none."""
    found: set[Path] = set()
    for entry in given:
        path = Path(entry)
        if path.is_dir():
            files = documents_in(path)
        else:
            files = [path] if path.exists() else [Path(name) for name in glob.glob(entry, recursive=True)]
            files = [file for file in files if file.is_file()]
        if not files:
            raise FileNotFoundError(
                f"{entry}: there is no file of JSON lines or text" + (" in this folder" if path.is_dir() else "")
            )
        found.update(files)
    return sorted(found)


def document_shards(given: Sequence[str]) -> list[Shard]:
    """A shard for each file of JSON, and one for every 10,000 .txt files, each of which is one document."""
    files = find_files(given)
    shards = [Shard(stem(path), (path,)) for path in files if not is_text(path)]
    texts = [path for path in files if is_text(path)]
    shards += [
        Shard(f"texts_{number:05d}", tuple(texts[first : first + TEXTS_A_SHARD]))
        for number, first in enumerate(range(0, len(texts), TEXTS_A_SHARD))
    ]
    return distinct(shards)


def file_shards(given: Sequence[str]) -> list[Shard]:
    """A shard for each file, whatever it holds."""
    return distinct([Shard(stem(path), (path,)) for path in find_files(given)])


def distinct(shards: list[Shard]) -> list[Shard]:
    """`shards`. ValueError where two of them would write the same output."""
    seen: dict[str, Shard] = {}
    for shard in shards:
        other = seen.setdefault(shard.name, shard)
        if other is not shard:
            raise ValueError(f"{other.files[0]} and {shard.files[0]} would both become {shard.name}: rename one")
    return shards


def label(document: Document) -> str:
    """A document's name and first words, for a report."""
    name = document.get("url") or document.get("id")
    words = " ".join(document["text"][: 2 * LABEL_CHARACTERS].split())
    return (f"{name}: {words}" if name else words)[:LABEL_CHARACTERS]


def read_documents(
    files: Sequence[Path], text_key: str, skip: Skip, read: Callable[[int], object]
) -> Iterator[tuple[int, Document]]:
    """(offset in its decompressed file, document) of each document that holds text.

    skip: is called for each other one, with "empty" and its place, or with "unreadable" and file, line and reason.
    read: is called with the numbers of bytes that were read.
    """
    for path in files:
        for place, offset, content in _entries(path, read):
            try:
                document = parse_text(path.name, content) if is_text(path) else parse(content, text_key)
            except (ValueError, RecursionError) as error:
                skip("unreadable", f"{place}: {error}")
                continue
            if document["text"].strip():
                yield offset, document
            else:
                skip("empty", place)


def _entries(path: Path, read: Callable[[int], object]) -> Iterator[tuple[str, int, bytes]]:
    """(place, offset, content): of a .txt file the whole, of another each line that is not blank."""
    if is_text(path):
        with open_bytes(path) as file:
            content = file.read()
        read(len(content))
        yield str(path), 0, content
    else:
        yield from (
            (f"{path}:{number}", offset, line) for number, offset, line in read_lines(path, read) if line.strip()
        )


def read_lines(path: Path, read: Callable[[int], object]) -> Iterator[tuple[int, int, bytes]]:
    """(line number from 1, offset, line) of a file."""
    offset = 0
    with open_bytes(path) as file:
        for number, line in enumerate(file, 1):
            read(len(line))
            yield number, offset, line
            offset += len(line)


def parse_text(name: str, content: bytes) -> Document:
    """The document that a .txt file is. ValueError where it is not UTF-8."""
    return {"id": name, "text": content.decode("utf-8").replace("\r\n", "\n")}


def parse(line: bytes, text_key: str) -> Document:
    """The document in a line, its text under "text". ValueError or RecursionError where there is none."""
    document = json.loads(line.decode("utf-8"))
    if not isinstance(document, dict):
        raise ValueError("not a JSON object: one document a line is expected")
    if not isinstance(document.get(text_key), str):
        raise ValueError(f"no text in the field {text_key!r} (--text-key)")
    if text_key != "text":
        document["text"] = document.pop(text_key)
    if b"\\ud" in line.lower():
        as_line(document)  # which refuses a lone surrogate, that only an escape can bring
    return document


def as_line(document: Document) -> bytes:
    """The document as a line of JSON. Equal documents give equal bytes."""
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode("utf-8") + b"\n"


def read_at(path: Path, offset: int, text_key: str) -> Document:
    """The document whose line begins at `offset` of an uncompressed file."""
    with open(path, "rb") as file:
        file.seek(offset)
        return parse(file.readline(), text_key)


def is_seekable(shard: Shard) -> bool:
    """Whether `read_at` can read the shard: it is one file of JSON that is not compressed."""
    return len(shard.files) == 1 and shard.files[0].name.endswith(JSON_SUFFIXES)
