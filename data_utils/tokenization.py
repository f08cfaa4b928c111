"""What a tokenizer is, and the one place that makes and loads them; each kind has a file of its own.

Every tokenizer is lossless (`decode(encode(text)) == text`) and no text can make it emit its end-of-document id.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

KINDS = ("GPT2BPETokenizer", "SentencePieceTokenizer", "bytes", "builtin")
PIECE_CHARACTERS = 1 << 20
FACTS_FILE = "tokenizer_facts.json"
OLD_FACTS_FILE = "tokenizer.json"  # until a library's own file of another content was found to have this name


class Tokenizer(ABC):
    """Text to ids and back.

    `pieces` holds the bytes of text that each id stands for, nothing for the end-of-document id `eod`.
    `byte_lengths` are their lengths, int64 [vocab_size]. `fingerprint` is a sha256 over everything that decides ids.
    `files` are the file names and contents that make this tokenizer again. `engine` is the library that runs it where
    several can.
    """

    engine = ""

    def __init__(self, kind: str, pieces: Sequence[bytes], eod: int, fingerprint: str,
                 files: Mapping[str, bytes]) -> None:
        self.kind = kind
        self.pieces = pieces
        self.vocab_size = len(pieces)
        self.eod = eod
        self.fingerprint = fingerprint
        self.files = files
        self.byte_lengths = np.fromiter(map(len, pieces), dtype=np.int64, count=len(pieces))

    @abstractmethod
    def encode(self, text: str) -> np.ndarray | list[int]:
        """The ids of `text`, never `eod`. ValueError where `text` holds a lone surrogate."""

    def encode_utf8(self, data: bytes) -> np.ndarray | list[int]:
        """The ids of a text that is at hand as valid UTF-8."""
        return self.encode(data.decode("utf-8"))

    def decode_bytes(self, ids: Sequence[int] | np.ndarray) -> bytes:
        """The bytes that `ids` stand for; ValueError for an id outside the vocabulary."""
        ids = np.asarray(ids, dtype=np.int64)
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < self.vocab_size:
            raise ValueError(f"token ids {ids.min()} to {ids.max()} do not fit a vocabulary of {self.vocab_size}")
        return b"".join(map(self.pieces.__getitem__, ids.tolist()))

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text; bytes that do not form UTF-8, as a model may generate, become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def save(self, directory: str | Path) -> None:
        """Write all that `load_tokenizer` needs into `directory`."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            (directory / name).write_bytes(content)
        facts = {"kind": self.kind, "fingerprint": self.fingerprint, "vocab_size": self.vocab_size,
                 "files": sorted(self.files)}
        (directory / FACTS_FILE).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def build_tokenizer(kind: str, *, vocab_file: str | None = None, merge_file: str | None = None,
                    cache_dir: str | None = None, model_file: str | None = None) -> Tokenizer:
    """The tokenizer of this kind; one line of ValueError or FileNotFoundError where a file or a package lacks."""
    # A kind's module is imported only here: each imports this one for the base class.
    if kind == "bytes":
        from data_utils.tokenization_bytes import ByteTokenizer
        return ByteTokenizer()
    if kind == "builtin":
        from data_utils.tokenization_gpt2 import builtin_tokenizer
        return builtin_tokenizer()
    if kind == "GPT2BPETokenizer":
        from data_utils.tokenization_gpt2 import gpt2_tokenizer
        return gpt2_tokenizer(*find_gpt2_files(vocab_file, merge_file, cache_dir))
    if kind == "SentencePieceTokenizer":
        from data_utils.tokenization_sentencepiece import SentencePieceTokenizer
        if model_file is None:
            raise ValueError("--tokenizer-type SentencePieceTokenizer needs --tokenizer-model: the model file, "
                             "trained there on the data if it is missing")
        if not Path(model_file).is_file():
            raise FileNotFoundError(f"--tokenizer-model: no such file: {model_file}")
        return SentencePieceTokenizer(Path(model_file).read_bytes(), model_file)
    raise ValueError(f"--tokenizer-type {kind} is unknown: one of {', '.join(KINDS)}")


def load_tokenizer(directory: str | Path) -> Tokenizer:
    """The tokenizer that `save` wrote into `directory`; ValueError where its files are not those that were saved."""
    directory = Path(directory)
    named = next((path for name in (FACTS_FILE, OLD_FACTS_FILE) if (path := directory / name).is_file()), None)
    if named is None:
        raise FileNotFoundError(f"{directory} holds no tokenizer: no file {FACTS_FILE}")
    try:
        facts = json.loads(named.read_text(encoding="utf-8"))
        kind, fingerprint = str(facts["kind"]), str(facts["fingerprint"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{named} is damaged: {error!r}") from None
    if kind not in KINDS:
        raise ValueError(f"{named} is damaged: {kind!r} is no kind of tokenizer")
    if kind == "builtin":  # the copy, not the one shipped today
        from data_utils.tokenization_gpt2 import BUILTIN_FILE, builtin_tokenizer
        tokenizer: Tokenizer = builtin_tokenizer(directory / BUILTIN_FILE)
    else:
        tokenizer = build_tokenizer(kind, vocab_file=str(directory / "encoder.json"),
                                    merge_file=str(directory / "vocab.bpe"),
                                    model_file=str(directory / "sentencepiece.model"))
    if tokenizer.fingerprint != fingerprint:
        raise ValueError(f"{directory}: the tokenizer's files are not those that were saved there")
    return tokenizer


def default_tokenizer_kind() -> str:
    """The shipped BPE where a library that runs it can be imported, else bytes, which needs numpy alone."""
    from data_utils.tokenization_gpt2 import bpe_engine
    return "builtin" if bpe_engine() else "bytes"


def user_cache() -> Path:
    """The folder of this user's downloaded vocabularies and tokenised data."""
    home = os.path.expanduser("~")
    if home == "~":  # a user without a home, as in some containers
        home = os.path.join(tempfile.gettempdir(), f"user-{os.getuid()}")
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.join(home, ".cache"), "gpt2-model-parallel")


def find_gpt2_files(vocab_file: str | None, merge_file: str | None, cache_dir: str | None) -> tuple[Path, Path]:
    """GPT-2's vocabulary and merges: the files named, else a pair in `cache_dir`, else one in the user's cache."""
    if vocab_file or merge_file:
        for flag, name, other in (("--vocab-file", vocab_file, "--merge-file"),
                                  ("--merge-file", merge_file, "--vocab-file")):
            if not name:
                raise ValueError(f"{other} needs {flag} beside it")
            if not Path(name).is_file():
                raise FileNotFoundError(f"{flag}: no such file: {name}")
        return Path(str(vocab_file)), Path(str(merge_file))
    folders = [Path(cache_dir)] if cache_dir else []
    for folder in [*folders, user_cache()]:
        for vocab, merges in (("encoder.json", "vocab.bpe"), ("gpt2-vocab.json", "gpt2-merges.txt"),
                              ("vocab.json", "merges.txt")):
            if (folder / vocab).is_file() and (folder / merges).is_file():
                return folder / vocab, folder / merges
    raise ValueError("the GPT-2 vocabulary is not on this machine: run scripts/download_gpt2_vocab.sh, or name its "
                     "files with --vocab-file and --merge-file")


def fingerprint_of(*parts: bytes | str) -> str:
    """sha256 in hex over the parts, each with its length so that their borders count."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def utf8(text: str) -> bytes:
    """`text` as UTF-8; ValueError where it holds a lone surrogate, which tokenizer libraries replace silently."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"text with a lone surrogate {text[error.start]!r} at character {error.start} "
                         "is not Unicode") from None


def split_text(text: str, limit: int = PIECE_CHARACTERS) -> Iterator[str]:
    """Parts of `text` of about `limit` characters at most twice, so that a file of gigabytes needs no list of all ids.

    A cut lies before a single space between two other characters, where every tokenizer starts a new token: the ids
    are those of the whole text. Where the second `limit` has no such space the cut is made all the same.
    """
    start = 0
    while len(text) - start > 2 * limit:
        cut = start + limit
        while cut < start + 2 * limit:
            cut = text.find(" ", cut, start + 2 * limit)
            if cut < 0:
                cut = start + 2 * limit
            elif text[cut - 1].isspace() or text[cut + 1].isspace():
                cut += 1
            else:
                break
        yield text[start:cut]
        start = cut
    yield text[start:]
