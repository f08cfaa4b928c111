"""Build a tokenizer by its kind, or load the tokenizer of a checkpoint.

base  the base class; tokenizers of bytes, of characters as in nanoGPT's small examples, and SentencePiece
gpt2  byte-level BPE, run by tiktoken or gigatoken
"""

import reprlib
from importlib.util import find_spec
from pathlib import Path

from data_utils.files import read_file, read_json_object, user_cache_dir, wrap_errors
from data_utils.tokenizers.base import (
    CHARACTERS_FILE,
    MAX_FILE_BYTES,
    METADATA_FILE,
    MODEL_FILE,
    OLD_METADATA_FILE,
    ByteTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
    read_characters,
)
from data_utils.tokenizers.gpt2 import BUILTIN_FILE, builtin_tokenizer, gpt2_tokenizer

KINDS = ("GPT2BPETokenizer", "SentencePieceTokenizer", "bytes", "builtin", "characters")
GPT2_FILES = (("encoder.json", "vocab.bpe"), ("gpt2-vocab.json", "gpt2-merges.txt"), ("vocab.json", "merges.txt"))


def build_tokenizer(
    kind: str,
    *,
    vocab_file: str | None = None,
    merge_file: str | None = None,
    cache_dir: str | None = None,
    model_file: str | None = None,
) -> Tokenizer:
    """Build a tokenizer of `kind`, one of KINDS.

    vocab_file: the vocabulary of characters or of GPT2BPETokenizer.
    merge_file: the merges of GPT2BPETokenizer. If neither file is given, both are searched in `cache_dir` and in the
        user's cache.
    model_file: the model of SentencePieceTokenizer.

    Raises ValueError or FileNotFoundError if a file or a package is missing or a file is damaged.
    """
    if kind == "bytes":
        return ByteTokenizer()
    if kind == "builtin":
        return builtin_tokenizer()
    if kind == "characters":
        if vocab_file is None:
            raise ValueError("--tokenizer-type characters needs --vocab-file: nanoGPT's meta.pkl")
        return read_characters(vocab_file)
    if kind == "GPT2BPETokenizer":
        vocab, merges = find_gpt2_files(vocab_file, merge_file, cache_dir)
        return gpt2_tokenizer(_read(vocab), _read(merges), f"--vocab-file {vocab}", f"--merge-file {merges}")
    if kind == "SentencePieceTokenizer":
        if model_file is None:
            raise ValueError(
                "--tokenizer-type SentencePieceTokenizer needs --tokenizer-model: the model file, "
                "which is trained on the data if it is missing"
            )
        if not Path(model_file).is_file():
            raise FileNotFoundError(f"--tokenizer-model: no such file: {model_file}")
        return SentencePieceTokenizer(_read(Path(model_file)), model_file)
    raise ValueError(f"--tokenizer-type {kind} is unknown: one of {', '.join(KINDS)}")


def _read(path: Path) -> bytes:
    with wrap_errors(path):
        return read_file(path, MAX_FILE_BYTES)


def kind_of_vocabulary(vocab_file: str) -> str:
    """Choose the kind of tokenizer, one of KINDS, by the name of a vocabulary file."""
    return "characters" if vocab_file.endswith(".pkl") else "GPT2BPETokenizer"


def load_tokenizer(directory: str | Path) -> Tokenizer:
    """Load the tokenizer that `save` wrote into `directory`. Raises ValueError if a file was changed."""
    directory = Path(directory)
    named = next((path for name in (METADATA_FILE, OLD_METADATA_FILE) if (path := directory / name).is_file()), None)
    if named is None:
        raise FileNotFoundError(f"{directory} does not hold a tokenizer: the file {METADATA_FILE} is missing")
    metadata = read_json_object(named, MAX_FILE_BYTES)
    kind = metadata.get("kind")
    if kind not in KINDS:
        raise ValueError(f"{named} is damaged: {reprlib.repr(kind)} is not a kind of tokenizer")
    if kind == "builtin":  # Use the saved copy, because this version may ship a different vocabulary.
        tokenizer: Tokenizer = builtin_tokenizer(directory / BUILTIN_FILE)
    else:
        tokenizer = build_tokenizer(
            kind,
            vocab_file=str(directory / (CHARACTERS_FILE if kind == "characters" else "encoder.json")),
            merge_file=str(directory / "vocab.bpe"),
            model_file=str(directory / MODEL_FILE),
        )
    if tokenizer.fingerprint != metadata.get("fingerprint"):
        raise ValueError(f"{directory}: the tokenizer's files are not those that were saved there")
    return tokenizer


def default_tokenizer_kind() -> str:
    """Return "builtin" if tiktoken is installed, otherwise "bytes", which needs only numpy."""
    return "builtin" if find_spec("tiktoken") else "bytes"


def find_gpt2_files(vocab_file: str | None, merge_file: str | None, cache_dir: str | None) -> tuple[Path, Path]:
    """Find GPT-2's vocabulary and merges: the given files, or a pair in `cache_dir`, or one in the user's cache."""
    named = {"--vocab-file": vocab_file, "--merge-file": merge_file}
    if any(named.values()):
        for flag, name in named.items():
            if not name:
                raise ValueError(f"{(named.keys() - {flag}).pop()} needs {flag}, too")
            if not Path(name).is_file():
                raise FileNotFoundError(f"{flag}: no such file: {name}")
        return Path(str(vocab_file)), Path(str(merge_file))
    for folder in [Path(cache_dir), user_cache_dir()] if cache_dir else [user_cache_dir()]:
        for vocab, merges in GPT2_FILES:
            if (folder / vocab).is_file() and (folder / merges).is_file():
                return folder / vocab, folder / merges
    raise ValueError(
        "the GPT-2 vocabulary is not on this machine: run scripts/download_gpt2_vocab.sh, or name its "
        "files with --vocab-file and --merge-file"
    )
