"""Several token files into one pair with a manifest."""

import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data_utils.files import hash_parts, sync_folder, write_sealed
from data_utils.indexed_dataset import IndexedDatasetBuilder, PairMerger
from data_utils.token_files import ForeignBin, describe, open_tokens, prefix_of, read_manifest


def merge(sources: Sequence[str], output_prefix: str, eod: int) -> dict[str, Any]:
    """Write the documents of all `sources`, in order, to the pair at `output_prefix`; returns its manifest.

    eod: the end-of-document id, which cuts nanoGPT's and llm.c's files into documents. ValueError or FileNotFoundError
    where the sources cannot be one pair.
    """
    if os.path.exists(f"{output_prefix}.idx"):
        raise ValueError(f"--output-prefix {output_prefix}: the pair exists: remove it, or name another one")
    Path(output_prefix).parent.mkdir(parents=True, exist_ok=True)
    temporary = f"{output_prefix}.{os.getpid()}.tmp"
    made: list[str] = []
    try:
        prefixes = []
        for number, source in enumerate(sources):
            data, prefix = open_tokens(source, eod), prefix_of(source)
            if isinstance(data, ForeignBin):
                prefix = f"{temporary}{number}"
                made.append(prefix)
                _write(data, prefix)
            prefixes.append(prefix)
        manifests = [read_manifest(prefix) for prefix in prefixes]
        tokenizers = [manifest["tokenizer"] for manifest in manifests if manifest and manifest["tokenizer"]]
        if any(tokenizer != tokenizers[0] for tokenizer in tokenizers):
            raise ValueError("the files were made by different tokenizers, as their manifests say: they can't be one")
        made.append(temporary)
        merger = PairMerger(temporary)
        for prefix in prefixes:
            merger.append(prefix)
        merger.finish()
        known = [
            manifest[".bin"] if manifest else [{"bytes": os.path.getsize(f"{prefix}.bin")}]
            for prefix, manifest in zip(prefixes, manifests, strict=True)
        ]
        parts = iter(hash_parts(f"{temporary}.bin", [part["bytes"] for of_one in known for part in of_one]))
        for source, manifest, of_one in zip(sources, manifests, known, strict=True):
            if list(itertools.islice(parts, len(of_one))) != of_one and manifest:
                raise ValueError(f"{source} is damaged: its tokens are not those of its manifest")
        merged = describe(
            temporary,
            {
                "tokenizer": tokenizers[0] if len(tokenizers) == len(sources) else None,
                "inputs": [
                    {"file": source, "bytes": sum(part["bytes"] for part in of_one)}
                    for source, of_one in zip(sources, known, strict=True)
                ],
            },
        )
        os.replace(f"{temporary}.bin", f"{output_prefix}.bin")
        write_sealed(Path(f"{output_prefix}.json"), merged)
        os.replace(f"{temporary}.idx", f"{output_prefix}.idx")
        sync_folder(Path(output_prefix).parent)
        return merged
    finally:
        for prefix in made:
            for suffix in (".bin", ".idx"):
                Path(f"{prefix}{suffix}").unlink(missing_ok=True)


def _write(data: ForeignBin, prefix: str) -> None:
    builder = IndexedDatasetBuilder(prefix, data.dtype)
    for number in range(len(data)):
        builder.add(data[number])
        builder.end_document()
    builder.finish()
