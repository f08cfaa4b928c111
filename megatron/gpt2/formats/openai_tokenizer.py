"""GPT-2-like tokenizers in Hugging Face's files.

Written are vocab.json, merges.txt and tokenizer_config.json. Read are the first two, which transformers 4 writes, or
tokenizer.json, which transformers 5 writes instead.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from data_utils import Tokenizer
from data_utils.files import read_object
from data_utils.tokenizers.gpt2 import END_OF_TEXT, byte_alphabet, gpt2_tokenizer, merge_of
from megatron.gpt2.formats.foreign import short_repr

MAX_TOKENIZER_BYTES = 64 << 20  # GPT-2's takes 3.5 MB
# What changes the ids of a text, and the values under which they are those of GPT-2's rules.
_PLAIN: dict[str, dict[str, tuple[Any, ...]]] = {
    "model": {
        "type": ("BPE",),
        "dropout": (None, 0.0),
        "continuing_subword_prefix": ("", None),
        "end_of_word_suffix": ("", None),
        "byte_fallback": (False,),
        "ignore_merges": (False,),
    },
    "pre_tokenizer": {"type": ("ByteLevel",), "add_prefix_space": (False,), "use_regex": (True,)},
}
_DEFAULTS = {
    "dropout": None,
    "continuing_subword_prefix": None,
    "end_of_word_suffix": None,
    "byte_fallback": False,
    "ignore_merges": False,
    "use_regex": True,
}  # what files of older versions do not say


def tokenizer_files(tokenizer: Tokenizer, max_length: int) -> tuple[dict[str, bytes], str]:
    """({name: content}, "") of a tokenizer that transformers can load with the same ids; or ({}, why there is none)."""
    if tokenizer.kind == "GPT2BPETokenizer":
        vocabulary, merges = tokenizer.files["encoder.json"], tokenizer.files["vocab.bpe"]
    elif tokenizer.kind in ("builtin", "bytes"):
        alphabet = byte_alphabet()

        def written(piece: bytes) -> str:
            return "".join(alphabet[value] for value in piece)

        ranked = list(tokenizer.token_bytes[: tokenizer.eod])
        names = [*map(written, ranked), END_OF_TEXT]
        vocabulary = json.dumps({name: number for number, name in enumerate(names)}, ensure_ascii=False).encode()
        merges = "\n".join(["#version: 0.2", *(f"{written(a)} {written(b)}" for a, b in merges_of(ranked))]).encode()
        merges += b"\n"
    else:
        return {}, f"transformers has none that is equal to {tokenizer.kind}; ours is in tokenizer/"
    config = {
        "tokenizer_class": "GPT2Tokenizer",
        "model_max_length": max_length,
        "add_prefix_space": False,
        **dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT),
    }
    return {
        "vocab.json": vocabulary,
        "merges.txt": merges,
        "tokenizer_config.json": (json.dumps(config, indent=2) + "\n").encode(),
    }, ""


def merges_of(ranked: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
    """The merge that made each token of several bytes. ValueError where a token does not come about by merges."""
    ranks = {token: rank for rank, token in enumerate(ranked)}
    merges = []
    for rank, token in enumerate(ranked):
        if len(token) > 1:
            if (pair := merge_of(token, ranks)) is None:
                raise ValueError(f"the tokenizer's token {rank} does not come about by merges")
            merges.append(pair)
    return merges


def open_tokenizer(files: Mapping[str, str]) -> Tokenizer:
    """The tokenizer of a folder of Hugging Face's: `files` are paths by name, vocab.json and merges.txt, or
    tokenizer.json. ValueError, one line, for one that is not byte-level BPE of GPT-2's kind."""
    if "tokenizer.json" not in files:
        paths = Path(files["vocab.json"]), Path(files["merges.txt"])
        names = f"--vocab-file {paths[0]}", f"--merge-file {paths[1]}"
        return gpt2_tokenizer(paths[0].read_bytes(), paths[1].read_bytes(), *names)
    path = Path(files["tokenizer.json"])
    found = read_object(path, MAX_TOKENIZER_BYTES)
    if found.get("normalizer") is not None:
        raise ValueError(f"{path}: has a normalizer, {short_repr(found['normalizer'])}: GPT-2's tokenizer has none")
    for part, plain in _PLAIN.items():
        held = found.get(part)
        for name, values in plain.items():
            value = held.get(name, _DEFAULTS.get(name, "")) if isinstance(held, dict) else held
            if not any(type(value) is type(known) and value == known for known in values):
                raise ValueError(
                    f"{path}: {name} of its {part} is {short_repr(value)}: it is no byte-level BPE of "
                    "GPT-2's kind, the only one that is read from here"
                )
    vocabulary, merges, added = found["model"].get("vocab"), found["model"].get("merges"), found.get("added_tokens")
    try:
        vocabulary = dict(vocabulary)
        for token in added or ():
            if token["special"] is not True:
                raise ValueError(f"{short_repr(token['content'])} is no special token, so a text would have it")
            vocabulary[token["content"]] = token["id"]
        # Older files have "a b" in the place of ["a", "b"].
        lines = "".join(f"{pair if isinstance(pair, str) else ' '.join(pair)}\n" for pair in merges)
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{path}: its vocabulary, merges or added tokens are not as GPT-2's are: "
            f"{' '.join(str(error)[:200].split())}"
        ) from error
    return gpt2_tokenizer(
        json.dumps(vocabulary, ensure_ascii=False).encode("utf-8", "surrogatepass"),
        f"#version: 0.2\n{lines}".encode("utf-8", "surrogatepass"),
        str(path),
        str(path),
    )
