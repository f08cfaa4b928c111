"""Read and write GPT-2-like tokenizers in Hugging Face's files.

Exports have vocab.json, merges.txt and tokenizer_config.json. The reader needs vocab.json and merges.txt, which
transformers 4 writes, or tokenizer.json, which transformers 5 writes instead.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from data_utils import Tokenizer
from data_utils.command_line import require
from data_utils.files import one_line, read_json_object
from data_utils.tokenizers.gpt2 import END_OF_TEXT, bytes_to_unicode, find_merge, gpt2_tokenizer
from megatron.gpt2.formats.foreign_checkpoint import short_repr

MAX_TOKENIZER_BYTES = 64 << 20  # GPT-2's tokenizer takes 3.5 MB.
# Settings that change the ids of a text, with the allowed values. None stands for a missing setting.
REQUIRED_SETTINGS: dict[str, dict[str, tuple[Any, ...]]] = {
    "model": {
        "type": ("BPE",),
        "dropout": (None, 0.0),
        "continuing_subword_prefix": (None, ""),
        "end_of_word_suffix": (None, ""),
        "byte_fallback": (None, False),
        "ignore_merges": (None, False),
    },
    "pre_tokenizer": {"type": ("ByteLevel",), "add_prefix_space": (False,), "use_regex": (None, True)},
}


def tokenizer_files(tokenizer: Tokenizer, max_length: int) -> tuple[dict[str, bytes], str]:
    """Return ({file name: content}, "") if transformers can load the tokenizer with the same ids, else ({}, reason)."""
    if tokenizer.kind == "GPT2BPETokenizer":
        vocabulary, merges = tokenizer.files["encoder.json"], tokenizer.files["vocab.bpe"]
    elif tokenizer.kind in ("builtin", "bytes"):
        ranked, alphabet = list(tokenizer.token_bytes[: tokenizer.eod]), bytes_to_unicode()
        written = {token: "".join(alphabet[value] for value in token) for token in ranked}
        numbers = {name: number for number, name in enumerate([*written.values(), END_OF_TEXT])}
        vocabulary = json.dumps(numbers, ensure_ascii=False).encode()
        pairs = [f"{written[a]} {written[b]}\n" for a, b in merges_of(ranked)]
        merges = "".join(["#version: 0.2\n", *pairs]).encode()
    else:
        return {}, f"transformers has no equal of {tokenizer.kind}; ours is in tokenizer/"
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
    """Return for each token of several bytes the two tokens that are merged to it."""
    ranks = {token: rank for rank, token in enumerate(ranked)}
    merges = []
    for rank, token in enumerate(ranked):
        if len(token) > 1:
            pair = find_merge(token, ranks)
            assert pair is not None, f"the tokenizer's token {rank} is not the result of a merge"
            merges.append(pair)
    return merges


def open_tokenizer(files: Mapping[str, str]) -> Tokenizer:
    """Open the tokenizer of a Hugging Face folder. Raises ValueError, in one line, if the tokenizer is not a byte-level
    BPE with GPT-2's rules.

    files: paths by name, of vocab.json and merges.txt or of tokenizer.json.
    """
    if "tokenizer.json" not in files:
        paths = Path(files["vocab.json"]), Path(files["merges.txt"])
        names = f"--vocab-file {paths[0]}", f"--merge-file {paths[1]}"
        return gpt2_tokenizer(paths[0].read_bytes(), paths[1].read_bytes(), *names)
    path = files["tokenizer.json"]
    found = read_json_object(Path(path), MAX_TOKENIZER_BYTES)
    normalizer = found.get("normalizer")
    require(normalizer is None, f"{path}: has a normalizer, {short_repr(normalizer)}: GPT-2's tokenizer has none")
    for part, plain in REQUIRED_SETTINGS.items():
        section = found.get(part)
        for name, values in plain.items():
            value = section.get(name) if isinstance(section, dict) else section
            problem = f"{path}: {name} of its {part} is {short_repr(value)}"
            require(value in values, f"{problem}: only byte-level BPE with GPT-2's rules is supported")
    try:
        vocabulary = dict(found["model"]["vocab"])
        for token in found.get("added_tokens") or ():
            require(token["special"] is True, f"{short_repr(token['content'])} is not a special token")
            vocabulary[token["content"]] = token["id"]
        pairs = found["model"]["merges"]  # In older files a merge is "a b" instead of ["a", "b"].
        lines = "".join(f"{pair if isinstance(pair, str) else ' '.join(pair)}\n" for pair in pairs)
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{path}: its vocabulary, merges or added tokens differ from GPT-2's form: {one_line(error)}"
        ) from error
    texts = json.dumps(vocabulary, ensure_ascii=False), f"#version: 0.2\n{lines}"
    encoded = [text.encode("utf-8", "surrogatepass") for text in texts]
    return gpt2_tokenizer(encoded[0], encoded[1], path, path)
