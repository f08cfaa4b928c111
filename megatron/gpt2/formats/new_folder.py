"""A folder that appears as a whole or not at all."""

import contextlib
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from data_utils.files import sync_folder


@contextlib.contextmanager
def new_folder(out: str | Path) -> Iterator[Path]:
    """A folder beside `out` to write into. At the end of the block its files are put on the disk and it is renamed to
    `out`. An error in the block removes it. ValueError where `out` exists and is not an empty folder."""
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out}: exists already and is not empty: give a new folder")
    folder = out.with_name(f"{out.name}.tmp-{secrets.token_hex(4)}")
    folder.mkdir(parents=True)
    try:
        yield folder
        for path in (*sorted(folder.rglob("*"), reverse=True), folder):
            sync_folder(path)  # of a file this puts the bytes on the disk
        folder.rename(out)  # over an empty folder at most
        sync_folder(out.parent)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
