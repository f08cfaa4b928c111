"""GPT-2-like tokenizers in the files that Hugging Face reads: vocab.json, merges.txt, tokenizer_config.json."""

from __future__ import annotations

import json
from collections.abc import Sequence

from data_utils import Tokenizer
from data_utils.tokenization_gpt2 import END_OF_TEXT, byte_alphabet


def tokenizer_files(tokenizer: Tokenizer, max_length: int) -> tuple[dict[str, bytes], str]:
    """(name -> content, "") of a tokenizer that transformers can load with the same ids; or ({}, why not)."""
    if tokenizer.kind == "GPT2BPETokenizer":
        vocabulary, merges = tokenizer.files["encoder.json"], tokenizer.files["vocab.bpe"]
    elif tokenizer.kind in ("builtin", "bytes"):
        alphabet = byte_alphabet()

        def written(piece: bytes) -> str:
            return "".join(alphabet[value] for value in piece)

        ranked = list(tokenizer.pieces[:tokenizer.eod])
        names = [*map(written, ranked), END_OF_TEXT]
        vocabulary = json.dumps({name: number for number, name in enumerate(names)}, ensure_ascii=False).encode()
        merges = "\n".join(["#version: 0.2", *(f"{written(a)} {written(b)}" for a, b in merges_of(ranked))]).encode()
        merges += b"\n"
    else:
        return {}, f"transformers has none that is equal to {tokenizer.kind}; ours is in tokenizer/"
    config = {"tokenizer_class": "GPT2Tokenizer", "model_max_length": max_length, "add_prefix_space": False,
              **dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT)}
    return {"vocab.json": vocabulary, "merges.txt": merges,
            "tokenizer_config.json": (json.dumps(config, indent=2) + "\n").encode()}, ""


def merges_of(ranked: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
    """The merge that made each token of several bytes: what the earlier merges leave of it is a pair."""
    ranks = {token: rank for rank, token in enumerate(ranked)}
    merges = []
    for rank, token in enumerate(ranked):
        if len(token) < 2:
            continue
        parts = [token[i:i + 1] for i in range(len(token))]
        while len(parts) > 2:
            joined = [ranks.get(a + b, len(ranked)) for a, b in zip(parts, parts[1:], strict=False)]
            at = joined.index(min(joined))
            if joined[at] >= rank:
                raise ValueError(f"the tokenizer's token {rank} does not come about by merges")
            parts[at:at + 2] = [parts[at] + parts[at + 1]]
        merges.append((parts[0], parts[1]))
    return merges
