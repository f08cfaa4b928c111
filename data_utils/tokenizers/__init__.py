"""Tokenizers by their kind, and those that a checkpoint brings along.

base  what a tokenizer is; bytes, characters as in nanoGPT's small examples, and SentencePiece with its training
gpt2  byte-level BPE, which tiktoken, HF tokenizers and gigatoken run
"""

import json
import reprlib
from pathlib import Path

from data_utils.files import one_line, user_cache
from data_utils.tokenizers.base import (
    CHARACTERS_FILE,
    FACTS_FILE,
    MODEL_FILE,
    OLD_FACTS_FILE,
    ByteTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
    read_characters,
)
from data_utils.tokenizers.gpt2 import BUILTIN_FILE, bpe_engine, builtin_tokenizer, gpt2_tokenizer

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
    """The tokenizer of this `kind`, one of KINDS.

    vocab_file: of characters, and with merge_file of GPT2BPETokenizer; without them both are looked for in `cache_dir`
    and in the user's cache. model_file: of SentencePieceTokenizer. ValueError or FileNotFoundError, one line, if a
    file or a package is missing or a file is damaged.
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
        names = f"--vocab-file {vocab}", f"--merge-file {merges}"
        return gpt2_tokenizer(vocab.read_bytes(), merges.read_bytes(), *names)
    if kind == "SentencePieceTokenizer":
        if model_file is None:
            raise ValueError(
                "--tokenizer-type SentencePieceTokenizer needs --tokenizer-model: the model file, "
                "trained there on the data if it is missing"
            )
        if not Path(model_file).is_file():
            raise FileNotFoundError(f"--tokenizer-model: no such file: {model_file}")
        return SentencePieceTokenizer(Path(model_file).read_bytes(), model_file)
    raise ValueError(f"--tokenizer-type {kind} is unknown: one of {', '.join(KINDS)}")


def kind_of_vocabulary(vocab_file: str) -> str:
    """The kind, one of KINDS, whose vocabulary a file of this name is."""
    return "characters" if vocab_file.endswith(".pkl") else "GPT2BPETokenizer"


def load_tokenizer(directory: str | Path) -> Tokenizer:
    """The tokenizer that `save` wrote into `directory`; ValueError if its files are not those that were saved."""
    directory = Path(directory)
    named = next((path for name in (FACTS_FILE, OLD_FACTS_FILE) if (path := directory / name).is_file()), None)
    if named is None:
        raise FileNotFoundError(f"{directory} holds no tokenizer: no file {FACTS_FILE}")
    try:
        facts = json.loads(named.read_text(encoding="utf-8"))
        kind, fingerprint = str(facts["kind"]), str(facts["fingerprint"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{named} is damaged: {type(error).__name__}: {one_line(error)}") from None
    if kind not in KINDS:
        raise ValueError(f"{named} is damaged: {reprlib.repr(kind)} is no kind of tokenizer")
    if kind == "builtin":  # the copy, not the one shipped today
        tokenizer: Tokenizer = builtin_tokenizer(directory / BUILTIN_FILE)
    else:
        tokenizer = build_tokenizer(
            kind,
            vocab_file=str(directory / (CHARACTERS_FILE if kind == "characters" else "encoder.json")),
            merge_file=str(directory / "vocab.bpe"),
            model_file=str(directory / MODEL_FILE),
        )
    if tokenizer.fingerprint != fingerprint:
        raise ValueError(f"{directory}: the tokenizer's files are not those that were saved there")
    return tokenizer


def default_tokenizer_kind() -> str:
    """The shipped BPE if a library that runs it can be imported, else bytes, which needs only numpy."""
    return "builtin" if bpe_engine() else "bytes"


def find_gpt2_files(vocab_file: str | None, merge_file: str | None, cache_dir: str | None) -> tuple[Path, Path]:
    """GPT-2's vocabulary and merges: the files named, else a pair in `cache_dir`, else one in the user's cache."""
    named = {"--vocab-file": vocab_file, "--merge-file": merge_file}
    if any(named.values()):
        for flag, name in named.items():
            if not name:
                raise ValueError(f"{(named.keys() - {flag}).pop()} needs {flag} beside it")
            if not Path(name).is_file():
                raise FileNotFoundError(f"{flag}: no such file: {name}")
        return Path(str(vocab_file)), Path(str(merge_file))
    for folder in [Path(cache_dir), user_cache()] if cache_dir else [user_cache()]:
        for vocab, merges in GPT2_FILES:
            if (folder / vocab).is_file() and (folder / merges).is_file():
                return folder / vocab, folder / merges
    raise ValueError(
        "the GPT-2 vocabulary is not on this machine: run scripts/download_gpt2_vocab.sh, or name its "
        "files with --vocab-file and --merge-file"
    )
