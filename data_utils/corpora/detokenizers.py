"""Convert word-level benchmark texts back to ordinary text, by Megatron's rules.

Published scores were made with Megatron's rules, so the rules stay unchanged, including their errors (PTB's " N " loses
its space).
"""

import re
from collections.abc import Iterable
from functools import partial

# Apply the pairs (pattern, replacement) in order.
_WIKITEXT = (
    ("s '", "s'"),
    # Restore numbers and punctuation, which WikiText surrounds with spaces.
    (" @-@ ", "-"),
    (" @,@ ", ","),
    (r" @\.@ ", "."),
    *((f" {re.escape(mark)} ", f"{mark} ") for mark in ":;.!?,"),
    # Remove spaces inside brackets and quotation marks.
    (r"\(\s*([^\)]*?)\s*\)", r"(\1)"),
    (r"\[\s*([^\]]*?)\s*\]", r"[\1]"),
    (r"{\s*([^}]*?)\s*}", r"{\1}"),
    (r'"\s*([^"]*?)\s*"', r'"\1"'),
    (r"'\s*([^']*?)\s*'", r"'\1'"),
    # Restore headings, degree signs, line breaks, the digit that " N " stands for, and "'s".
    ("= = = =", "===="),
    ("= = =", "==="),
    ("= =", "=="),
    (" \N{DEGREE SIGN} ", "\N{DEGREE SIGN}"),
    (" \n", "\n"),
    ("\n ", "\n"),
    (" N ", " 1 "),
    (" 's", "'s"),
)
_PTB = ((" '", "'"), (" \n", "\n"), ("\n ", "\n"), (" n't", "n't"), (" N ", "1 "), (r"\$ 1", "$1"), ("# 1", "#1"))


def _apply(rules: Iterable[tuple[str, str]], text: str) -> str:
    for pattern, replacement in rules:
        text = re.sub(pattern, replacement, text)
    return text


wikitext_detokenizer = partial(_apply, _WIKITEXT)
ptb_detokenizer = partial(_apply, _PTB)
