"""Cleanup: mend broken text, keep one language, drop what is too short."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from data_utils.tokenizers import build_tokenizer
from data_utils.tokenizers.base import Tokenizer
from megatron.gpt2.extensions.webtext.documents import label
from megatron.gpt2.extensions.webtext.shard_run import ShardRun

LANGUAGE_CHARACTERS = 3000  # of a text, by which its language is found: that runs at 4 MB/s
# What ftfy may change in a line: all but printable ASCII without an ampersand. The rest is ftfy's fixed point.
SUSPECT = re.compile(r"[^\t\n\x20-\x25\x27-\x7e]")


def mend(text: str) -> str:
    """ftfy.fix_text(text), which works line by line. Lines that it would leave unchanged are not passed to it."""
    if not SUSPECT.search(text):
        return text
    import ftfy

    lines = re.findall(r"[^\n]*\n|[^\n]+", text)
    unescape: Any = "auto"
    for number, line in enumerate(lines):
        if SUSPECT.search(line):
            lines[number] = ftfy.fix_text(line, unescape_html=unescape)
        if "<" in line:  # from the first tag on, ftfy takes a text for HTML and leaves its entities
            unescape = False
    return "".join(lines)


def language_of(text: str) -> str:
    """The code of the likeliest of 97 languages, by a model that comes with py3langid."""
    import py3langid

    return py3langid.classify(text[:LANGUAGE_CHARACTERS])[0]


def at_least(tokenizer: Tokenizer, tokens: int) -> Callable[[str], bool]:
    """A function that says whether a text has at least `tokens` tokens. It tokenises a text only where the number of
    bytes does not decide."""
    longest = int(tokenizer.byte_lengths.max())

    def enough(text: str) -> bool:
        size = len(text.encode("utf-8"))
        return size >= tokens and (size > tokens * longest or len(tokenizer.encode(text)) >= tokens)

    return enough


def cleanup(run: ShardRun, *, language: str, min_tokens: int, tokenizer: Mapping[str, Any], fingerprint: str) -> None:
    """The stage: each document mended; dropped are those that are empty then, of fewer than `min_tokens` tokens, or of
    another language than `language`, a code of two letters or "any".

    tokenizer: the arguments of `build_tokenizer`. fingerprint: that of the tokenizer, recorded in the manifest.
    """
    enough = at_least(build_tokenizer(**tokenizer), min_tokens)
    for document in run.documents():
        document["text"] = mend(document["text"]).strip()
        if not document["text"]:
            run.drop("empty once mended", document)
        elif not enough(document["text"]):
            run.drop(f"fewer than {min_tokens} tokens", document)
        elif language != "any" and (found := language_of(document["text"])) != language:
            run.drop(f"not {language}", f"{found}: {label(document)}")
        else:
            run.write(document)
