"""One shard through one stage: a shard in, outputs and a manifest out, whole or not at all.

    <output>/<name>.jsonl             what the stage writes, renamed into place when it is whole and on the disk
    <output>/manifests/<shard>.json   what it was made of and by, written last: without it the outputs count for nothing

A manifest names the stage, the parameters, the libraries and the input by its sha256; counts what came in, went out
and was dropped, by reason, with samples; and holds the sha256 of every output. A shard whose manifest says all that of
today's input and of outputs that are there is not run again. Manifests hold no times and no folders: equal input gives
equal bytes.
"""

import contextlib
import errno
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, BinaryIO

from data_utils.corpora.documents import HOPELESS_LINES, MANIFESTS
from data_utils.files import STAGE_MANIFEST_VERSION, flush_to_disk, hash_file, replacing, sync_folder
from megatron.gpt2.extensions.webtext.documents import Document, Shard, as_line, label, read_documents, read_lines

SAMPLES = 3  # of each reason, kept in a manifest


@dataclass(frozen=True)
class Stage:
    """`work(run, **parameters, **settings)` does one shard. `parameters` decide the output and are recorded, and so
    are the versions of `libraries`; `settings` do not, such as paths and numbers of threads."""

    name: str
    work: Callable[..., None]
    parameters: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    libraries: tuple[str, ...] = ()
    text_key: str = "text"

    def recorded(self, limit: int | None) -> dict[str, Any]:
        """What a manifest must say for its outputs to be those of today."""
        return {
            "format": STAGE_MANIFEST_VERSION,
            "stage": self.name,
            "parameters": dict(self.parameters),
            "limit": limit,
            "text_key": self.text_key,
            "libraries": {name: version(name) for name in self.libraries},
        }


def version(library: str) -> str:
    """ValueError with the command that installs it where a library is absent."""
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        raise ValueError(
            f"this stage needs {library}: python -m pip install -c constraints.txt -e '.[curate]'"
        ) from None


class ShardRun:
    """One shard at work: what its stage reads, writes and drops."""

    def __init__(
        self,
        stage: Stage,
        shard: Shard,
        output: Path,
        limit: int | None = None,
        read: Callable[[int], object] = lambda count: None,
    ) -> None:
        self.stage, self.shard, self.output, self.limit = stage, shard, output, limit
        self.entered = self.left = 0
        self.dropped: dict[str, dict[str, Any]] = {}
        self._read = read
        self._files: dict[str, BinaryIO] = {}

    def documents(self) -> Iterator[Document]:
        """The documents of the shard, not more than the limit."""
        return (document for _, document in self.located())

    def located(self) -> Iterator[tuple[int, Document]]:
        """(offset in the decompressed file, document) of each document of the shard, not more than the limit."""
        return self._counted(read_documents(self.shard.files, self.stage.text_key, self._skip, self._read))

    def lines(self) -> Iterator[str]:
        """The lines of the shard that are not empty, not more than the limit, without the white space around them."""
        found = (line for path in self.shard.files for _, _, line in read_lines(path, self._read))
        texts = (line.decode("utf-8", "replace").strip() for line in found)
        return self._counted(text for text in texts if text)

    def _counted(self, items: Iterator[Any]) -> Iterator[Any]:
        while (self.limit is None or self.entered < self.limit) and (item := next(items, None)) is not None:
            self.entered += 1
            yield item

    def _skip(self, reason: str, sample: str) -> None:
        self.entered += 1
        self.drop(reason, sample)
        if self.entered == self.dropped[reason]["count"] == HOPELESS_LINES:  # rather now than after hours
            raise ValueError(
                f"{self.dropped[reason]['samples'][0]}; and so are all of the first {HOPELESS_LINES} entries"
            )

    def drop(self, reason: str, what: Document | str) -> None:
        """Count a document that does not go on; the first ones are kept as samples."""
        entry = self.dropped.setdefault(reason, {"count": 0, "samples": []})
        entry["count"] += 1
        if len(entry["samples"]) < SAMPLES:
            entry["samples"].append(what if isinstance(what, str) else label(what))

    def write(self, document: Document, name: str = "") -> None:
        """A document that goes on, into the output `name`, else into the one that is called as the shard."""
        self.left += 1
        self.file(name or f"{self.shard.name}.jsonl").write(as_line(document))

    def file(self, name: str) -> BinaryIO:
        """An output by its name in the folder; it appears there when the shard is done."""
        if name not in self._files:
            path = self.output / name
            path.parent.mkdir(parents=True, exist_ok=True)
            self._files[name] = open(temporary(path), "wb")  # noqa: SIM115  closed by `commit`
        return self._files[name]

    def commit(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """Outputs, then the manifest, each whole and on the disk before it has its name."""
        assert self.entered == self.left + sum(entry["count"] for entry in self.dropped.values()), "nothing is lost"
        outputs = []
        for name, file in self._files.items():
            flush_to_disk(file)
            file.close()
            path = self.output / name
            written = temporary(path)
            outputs.append({"name": name, "bytes": written.stat().st_size, "sha256": hash_file(written)})
            os.replace(written, path)
            sync_folder(path.parent)
        whole = {**manifest, "entered": self.entered, "left": self.left, "dropped": self.dropped, "outputs": outputs}
        path = manifest_path(self.output, self.shard)
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, temporary(path)) as stream:
            stream.write((json.dumps(whole, indent=1, ensure_ascii=False) + "\n").encode())
        return whole

    def abandon(self) -> None:
        """Close and remove what was written so far."""
        for name, file in self._files.items():
            with contextlib.suppress(OSError):  # a full disk refuses the last block once more
                file.close()
            temporary(self.output / name).unlink(missing_ok=True)


def run_shard(
    stage: Stage,
    shard: Shard,
    output: Path,
    limit: int | None = None,
    read: Callable[[int], object] = lambda count: None,
) -> dict[str, Any]:
    """The manifest of the shard's outputs, which are made where they are not there. What fails leaves nothing."""
    wanted = {**stage.recorded(limit), "input": shard.facts()}
    found = finished(output, shard, wanted)
    if found is not None:
        read(shard.bytes)
        return found
    remove(output, shard)
    run = ShardRun(stage, shard, output, limit, read)
    try:
        stage.work(run, **stage.parameters, **stage.settings)
        return run.commit(wanted)
    except BaseException as error:
        run.abandon()
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise OSError(f"{output}: the disk is full: make room, and the same command goes on where it was") from None
        raise


def finished(output: Path, shard: Shard, wanted: Mapping[str, Any]) -> dict[str, Any] | None:
    """The manifest that an earlier run left, if it records the same work and its outputs are there, unchanged."""
    try:
        found = json.loads(manifest_path(output, shard).read_text(encoding="utf-8"))
        outputs = {output / entry["name"]: entry for entry in found["outputs"]}
        same = {key: found.get(key) for key in wanted} == json.loads(json.dumps(wanted))
        return (
            found
            if same
            and all(
                path.stat().st_size == entry["bytes"] and hash_file(path) == entry["sha256"]
                for path, entry in outputs.items()
            )
            else None
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def remove(output: Path, shard: Shard) -> None:
    """Take away what an earlier run of the shard left, of another input or by other parameters: it may have written
    files that this one will not."""
    path = manifest_path(output, shard)
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        names = [entry["name"] for entry in json.loads(path.read_text(encoding="utf-8"))["outputs"]]
        path.unlink()
        for name in names:
            (output / name).unlink(missing_ok=True)


def manifest_path(output: Path, shard: Shard) -> Path:
    """Where the manifest of a shard lies in a stage's output."""
    return output / MANIFESTS / f"{shard.name}.json"


def temporary(path: Path) -> Path:
    """The hidden name of a file until it is whole."""
    return path.with_name(f".{path.name}.tmp")
