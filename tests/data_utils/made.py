"""Made for the tests of data."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from data_utils import IndexedDatasetBuilder, build_tokenizer

BYTES = build_tokenizer("bytes")


def write_pair(prefix: str | Path, documents: Iterable[Any], dtype: Any = "<u2") -> str:
    with IndexedDatasetBuilder(prefix, np.dtype(dtype)) as builder:
        for document in documents:
            builder.add(document)
            builder.end_document()
    return str(prefix)
