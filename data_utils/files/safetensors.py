"""The header of a safetensors file: 8 bytes, the length of the rest, little-endian; then a JSON object.

    {"__metadata__": {...}, tensor: {"dtype": "F32", "shape": [...], "data_offsets": [first byte, one past the last]}}

Offsets count from the end of the header. https://huggingface.co/docs/safetensors describes the format.
"""

import json
from collections.abc import Mapping
from typing import Any, BinaryIO

from data_utils.files.checked_json import parse_object

ALIGNMENT = 8  # bytes: spaces fill the header up to a multiple of it


def header_bytes(entries: Mapping[str, Any]) -> bytes:
    """The header of a file with these `entries`, in their order."""
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def read_header(stream: BinaryIO, max_bytes: int) -> dict[str, Any]:
    """The entries of the file that `stream` is at the beginning of. ValueError where its header is larger than
    `max_bytes` or is no JSON object, or where a key occurs twice."""
    length = int.from_bytes(stream.read(8), "little")
    if length > max_bytes:
        raise ValueError(f"its header of {length:,} bytes is larger than {max_bytes:,}")
    return parse_object(stream.read(length))
