"""Names for files: `--train-data wikipedia` reads what that entry of a JSON file lists.

    {"wikipedia": {"files": ["data/wikipedia/wikidump_lines.json"], "text_key": "text"}}

The file is $MEGATRON_CORPORA, else data/corpora.json in the current folder, else the one of this checkout. A path in it
is relative to the current folder, as a path on the command line is; `text_key` may be left out.
"""

import json
import os
import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from data_utils.command_line import how_to_call
from data_utils.corpora.documents import BUILTIN

HERE = Path("data", "corpora.json")
VARIABLE = "MEGATRON_CORPORA"

Entry = tuple[tuple[str, ...], str | None]  # files, text key


def find_corpora(flags: Mapping[str, Sequence[str]], text_key: str | None) -> tuple[list[tuple[str, ...]], str | None]:
    """The files of each flag, in order, with a named corpus replaced by its files; and the text key: the one that is
    given, else that of the corpora.

    flags: the words of each flag. A path that holds a "/" or a "." is never a name. FileNotFoundError names a corpus
    whose file is missing, and the line to write. ValueError where two corpora have different text keys.
    """
    listed = corpora_file()
    entries = read_corpora(listed) if listed.is_file() or VARIABLE in os.environ else {}
    found, keys = [], {}
    for flag, names in flags.items():
        files: list[str] = []
        for name in names:
            if name in entries:
                paths, keys[name] = entries[name]
                for path in paths:
                    if not Path(path).exists():
                        raise FileNotFoundError(
                            f"{flag} {name}: there is no file {path}, which {listed} names: put it "
                            f"there, or write {_line(name)} into {listed}"
                        )
                files += paths
            elif name != BUILTIN and not Path(name).exists() and not {"/", "."} & set(name):
                raise FileNotFoundError(
                    f"{flag}: no such file: {name}; nor is it a corpus, which {_line(name)} in {listed} would make it"
                )
            else:
                files.append(name)
        found.append(tuple(files))
    if text_key is None and keys:
        if len(set(keys.values())) > 1:
            raise ValueError(
                f"{' and '.join(keys)} have their text in different fields: give --text-key, or make a "
                f".bin/.idx pair of each with {how_to_call('preprocess_data')} for --data-path"
            )
        text_key = next(iter(keys.values()))
    return found, text_key


def corpora_file() -> Path:
    """The file of named corpora: $MEGATRON_CORPORA, that of the current folder, or that of the checkout. It need not
    exist."""
    if VARIABLE in os.environ:
        return Path(os.environ[VARIABLE])
    shipped = Path(__file__).resolve().parents[1] / HERE
    return HERE if HERE.is_file() or not shipped.is_file() else shipped


def read_corpora(path: Path) -> dict[str, Entry]:
    """The corpora in the file `path`, by name. ValueError or FileNotFoundError, in one line, where it is no such file."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"${VARIABLE}: no such file: {path}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(entries, dict):
        raise ValueError(f"{path} is not a JSON object of entries such as {_line('name')}")
    return {name: _entry(path, name, entry) for name, entry in entries.items()}


def _entry(path: Path, name: str, entry: object) -> Entry:
    files = entry.get("files") if isinstance(entry, dict) else None
    if (
        not isinstance(entry, dict)
        or not isinstance(files, list)
        or not files
        or entry.keys() - {"files", "text_key"}
        or not all(isinstance(value, str) for value in [*files, entry.get("text_key", "")])
    ):
        raise ValueError(f"{path}: the entry {reprlib.repr(name)} is not of the form {_line('name')}")
    return tuple(files), entry.get("text_key")


def _line(name: str) -> str:
    return f'{json.dumps(name)}: {{"files": ["PATH"], "text_key": "text"}}'
