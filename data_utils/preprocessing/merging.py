"""Several token files into one pair with a manifest."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data_utils.dataset_manifest import describe, read_manifest
from data_utils.files.atomic import sync_folder
from data_utils.files.hashing import hash_parts
from data_utils.files.sealed_json import write_sealed
from data_utils.foreign_bins import ForeignBin, open_tokens, prefix_of
from data_utils.indexed_dataset import IndexedDatasetBuilder, PairMerger


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
            data = open_tokens(source, eod)
            if isinstance(data, ForeignBin):
                made.append(f"{temporary}{number}")
                _write(data, made[-1])
            prefixes.append(made[-1] if isinstance(data, ForeignBin) else prefix_of(source))
        manifests = [read_manifest(prefix) for prefix in prefixes]
        tokenizers = [manifest["tokenizer"] for manifest in manifests if manifest and manifest["tokenizer"]]
        if any(tokenizer != tokenizers[0] for tokenizer in tokenizers):
            raise ValueError("the files were made by different tokenizers, as their manifests say: they can't be one")
        made.append(temporary)
        merger = PairMerger(temporary)
        for prefix in prefixes:
            merger.append(prefix)
        merger.finish()
        known = [manifest[".bin"] if manifest else [{"bytes": os.path.getsize(f"{prefix}.bin")}]
                 for prefix, manifest in zip(prefixes, manifests, strict=True)]
        parts = hash_parts(f"{temporary}.bin", [part["bytes"] for of_one in known for part in of_one])
        for source, of_one in zip(sources, known, strict=True):
            copied, parts_left = parts[:len(of_one)], parts[len(of_one):]
            if any("sha256" in part for part in of_one) and copied != of_one:
                raise ValueError(f"{source} is damaged: its tokens are not those of its manifest")
            parts = parts_left
        manifest = describe(temporary, {
            "tokenizer": tokenizers[0] if len(tokenizers) == len(sources) else None,
            "inputs": [{"file": source, "bytes": sum(part["bytes"] for part in of_one)}
                       for source, of_one in zip(sources, known, strict=True)]})
        os.replace(f"{temporary}.bin", f"{output_prefix}.bin")
        write_sealed(Path(f"{output_prefix}.json"), manifest)
        os.replace(f"{temporary}.idx", f"{output_prefix}.idx")
        sync_folder(Path(output_prefix).parent)
        return manifest
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
