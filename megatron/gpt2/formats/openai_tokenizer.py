"""GPT-2-like tokenizers in Hugging Face's files.

Written are vocab.json, merges.txt and tokenizer_config.json. Read are the first two, which transformers 4 writes, or
tokenizer.json, which transformers 5 writes instead.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from data_utils import Tokenizer
from data_utils.files import one_line, read_object
from data_utils.tokenizers.gpt2 import END_OF_TEXT, byte_alphabet, gpt2_tokenizer, merge_of
from megatron.gpt2.formats.foreign import short_repr

MAX_TOKENIZER_BYTES = 64 << 20  # GPT-2's takes 3.5 MB
# What changes the ids of a text, and the values under which they are those of GPT-2's rules. Files of older versions do
# not have the entries that end in UNSAID.
UNSAID = object()
PLAIN: dict[str, dict[str, tuple[Any, ...]]] = {
    "model": {
        "type": ("BPE",),
        "dropout": (None, 0.0, UNSAID),
        "continuing_subword_prefix": ("", None, UNSAID),
        "end_of_word_suffix": ("", None, UNSAID),
        "byte_fallback": (False, UNSAID),
        "ignore_merges": (False, UNSAID),
    },
    "pre_tokenizer": {"type": ("ByteLevel",), "add_prefix_space": (False,), "use_regex": (True, UNSAID)},
}


def tokenizer_files(tokenizer: Tokenizer, max_length: int) -> tuple[dict[str, bytes], str]:
    """({name: content}, "") of a tokenizer that transformers can load with the same ids; or ({}, why there is none)."""
    if tokenizer.kind == "GPT2BPETokenizer":
        vocabulary, merges = tokenizer.files["encoder.json"], tokenizer.files["vocab.bpe"]
    elif tokenizer.kind in ("builtin", "bytes"):
        ranked, alphabet = list(tokenizer.token_bytes[: tokenizer.eod]), byte_alphabet()
        written = {piece: "".join(alphabet[value] for value in piece) for piece in ranked}
        numbers = {name: number for number, name in enumerate([*written.values(), END_OF_TEXT])}
        vocabulary = json.dumps(numbers, ensure_ascii=False).encode()
        pairs = [f"{written[a]} {written[b]}\n" for a, b in merges_of(ranked)]
        merges = "".join(["#version: 0.2\n", *pairs]).encode()
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
    path = files["tokenizer.json"]
    found = read_object(Path(path), MAX_TOKENIZER_BYTES)
    if found.get("normalizer") is not None:
        raise ValueError(f"{path}: has a normalizer, {short_repr(found['normalizer'])}: GPT-2's tokenizer has none")
    for part, plain in PLAIN.items():
        held = found.get(part)
        for name, values in plain.items():
            value = held.get(name, UNSAID) if isinstance(held, dict) else held
            if not any(type(value) is type(known) and value == known for known in values):
                said = "not there" if value is UNSAID else short_repr(value)
                raise ValueError(
                    f"{path}: {name} of its {part} is {said}: it is not a byte-level BPE of GPT-2's kind, the only one "
                    "that is read from here"
                )
    try:
        vocabulary = dict(found["model"]["vocab"])
        for token in found.get("added_tokens") or ():
            if token["special"] is not True:
                raise ValueError(f"{short_repr(token['content'])} is not a special token, so a text would have it")
            vocabulary[token["content"]] = token["id"]
        pairs = found["model"]["merges"]  # older files have "a b" instead of ["a", "b"]
        lines = "".join(f"{pair if isinstance(pair, str) else ' '.join(pair)}\n" for pair in pairs)
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{path}: its vocabulary, merges or added tokens are not as GPT-2's are: {one_line(error)}"
        ) from error
    texts = json.dumps(vocabulary, ensure_ascii=False), f"#version: 0.2\n{lines}"
    encoded = [text.encode("utf-8", "surrogatepass") for text in texts]
    return gpt2_tokenizer(encoded[0], encoded[1], path, path)
