"""The work of the stages that take one document, or one address, after the other."""

import argparse
import bisect
import functools
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from data_utils.tokenizers import build_tokenizer
from data_utils.tokenizers.base import Tokenizer
from megatron.gpt2.extensions.webtext.shards import UNREADABLE, Shard, ShardRun, label

SHORTEST, LONGEST = 9, 2048  # characters of an address
# Sites of pictures, sound, video, programs, shops, short links and log-ins, by their name before the public suffix or
# with it; and endings of files that are no pages.
BLACKLIST = Path(__file__).with_name("blacklist.json")
LANGUAGE_CHARACTERS = 3000  # of a text, by which its language is found: that runs at 4 MB/s
# ftfy may change a line with anything but printable ASCII without an ampersand. The rest is ftfy's fixed point.
SUSPECT = re.compile(r"[^\t\n\x20-\x25\x27-\x7e]")
WORDS = 13
WORD = re.compile(r"\w+")
SPLITS = ("train", "valid", "test")


def normal(url: str) -> str:
    """The address without what a server never sees: the fragment, the case of the host, the scheme's own port.
    ValueError if it has no host or an impossible port."""
    parts = urlsplit(url)
    if not parts.hostname:
        raise ValueError("no host")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    port = "" if parts.port in (None, {"http": 80, "https": 443}.get(parts.scheme)) else f":{parts.port}"
    return urlunsplit((parts.scheme.lower(), host + port, parts.path or "/", parts.query, ""))


def page_key(url: str) -> str:
    """The same for addresses that differ in the scheme, in "www." or in a last slash, as of links to one page."""
    parts = urlsplit(url)
    return f"{parts.netloc.removeprefix('www.')}{parts.path.rstrip('/')}?{parts.query}"


def refusal() -> Callable[[str], str | None]:
    """A function that says why an address is not worth a download, or None."""
    import tldextract

    blacklist = json.loads(BLACKLIST.read_text(encoding="utf-8"))
    sites, extensions = set(blacklist["sites"]), set(blacklist["extensions"])
    # The list of public suffixes that comes with the library: no network, no cache.
    extract = tldextract.TLDExtract(suffix_list_urls=(), cache_dir=None)

    def reason(url: str) -> str | None:
        if not SHORTEST <= len(url) <= LONGEST:
            return "too short" if len(url) < SHORTEST else "too long"
        try:
            parts = urlsplit(normal(url))
        except ValueError:
            return "malformed"
        if re.search(r"[\s\x00-\x1f\x7f<>\"]", url):
            return "malformed"
        if parts.scheme not in ("http", "https"):
            return "neither http nor https"
        found = extract.extract_str(parts.hostname or "")
        if not found.suffix or not found.domain:
            return "malformed"  # an address in a local network, or a number
        if found.domain in sites or f"{found.domain}.{found.suffix}" in sites:
            return "site without text"
        _, dot, extension = parts.path.rpartition("/")[2].rpartition(".")
        return "file that is no page" if dot and extension.lower() in extensions else None

    return reason


def filter_urls(run: ShardRun) -> None:
    """Addresses, one a line, of all files; those that go on into files of --urls-per-file, which are the shards of the
    download. A hash of every page is held in memory, about 100 bytes each."""
    reason = refusal()
    seen: set[bytes] = set()
    for url in run.lines():
        why = reason(url)
        if why is None:
            url = normal(url)
            key = hashlib.blake2b(page_key(url).encode("utf-8", "surrogatepass"), digest_size=16).digest()
            if key not in seen:
                seen.add(key)
                run.file(f"urls_{run.left // run.args.urls_per_file:05d}.txt").write(url.encode() + b"\n")
                run.left += 1
                continue
            why = "duplicate"
        run.drop(why, url[:200])


def fix_text(text: str) -> str:
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


def has_tokens(tokenizer: Tokenizer, text: str, least: int) -> bool:
    """Whether a text has at least so many tokens. It is tokenized only if the number of bytes does not decide."""
    size = len(text.encode("utf-8"))
    return size >= least and (size > least * int(tokenizer.byte_lengths.max()) or len(tokenizer.encode(text)) >= least)


def cleanup(run: ShardRun) -> None:
    """Each document fixed by ftfy; dropped are those that are empty then, that have fewer than --min-tokens tokens, or
    that are in another language than --language."""
    args = run.args
    tokenizer = build_tokenizer(**args.tokenizer)
    for document in run.documents():
        text = document["text"] = fix_text(document["text"]).strip()
        if not text:
            run.drop("empty once fixed", document)
        elif not has_tokens(tokenizer, text, args.min_tokens):
            run.drop(f"fewer than {args.min_tokens} tokens", document)
        elif args.language != "any" and (found := language_of(text)) != args.language:
            run.drop(f"not {args.language}", f"{found}: {label(document)}")
        else:
            run.write(document)


def word_runs(text: str) -> Iterator[tuple[str, ...]]:
    """Every 13 words in a row, in lower case. Words are letters and digits: punctuation and white space make no
    difference."""
    words = WORD.findall(text.lower())
    return zip(*(words[start:] for start in range(WORDS)), strict=False)


@functools.lru_cache(1)  # a process does many shards
def evaluation_runs(paths: tuple[Path, ...], text_key: str) -> tuple[set[tuple[str, ...]], int]:
    """The runs of 13 words of the evaluation texts at `paths`, and how many texts are shorter, which cannot be found.
    ValueError if there is no run, or names a line that holds no text under `text_key`."""
    reading = ShardRun(argparse.Namespace(text_key=text_key), Shard("evaluation", paths))
    runs: set[tuple[str, ...]] = set()
    too_short = 0
    for document in reading.documents():
        found = set(word_runs(document["text"]))
        runs |= found
        too_short += not found
    if UNREADABLE in reading.dropped:
        raise ValueError(reading.dropped[UNREADABLE]["samples"][0])
    if not runs:
        raise ValueError(f"the evaluation sets hold no text of {WORDS} words")
    return runs, too_short


def decontaminate(run: ShardRun) -> None:
    """Drops each document that shares a run of 13 words with a text of --evaluation."""
    runs, _ = evaluation_runs(run.args.evaluation_files, run.args.evaluation_key)
    for document in run.documents():
        found = next((words for words in word_runs(document["text"]) if words in runs), None)
        if found is None:
            run.write(document)
        else:
            run.drop("in an evaluation set", " ".join(found))


def merge(run: ShardRun) -> None:
    """Every document of every file, in their order, in one file."""
    for document in run.documents():
        run.write(document, run.args.name)


def split(run: ShardRun) -> None:
    """The hash of a document's text and of --seed says where it goes: it stays there when the corpus grows, and equal
    texts stay together."""
    shares = list(map(Fraction, run.args.shares))
    ends = list(itertools.accumulate(shares))  # the last is their sum
    for document in run.documents():
        key = str(run.args.seed).encode()
        digest = hashlib.blake2b(document["text"].encode("utf-8"), digest_size=8, key=key).digest()
        place = Fraction(int.from_bytes(digest, "little"), 2**64) * ends[-1]
        run.write(document, f"{SPLITS[bisect.bisect_right(ends, place)]}.jsonl")
