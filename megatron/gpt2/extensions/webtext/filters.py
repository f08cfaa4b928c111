"""Steps that process one document, or one URL, at a time."""

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
from megatron.gpt2.extensions.webtext.step import UNREADABLE, StepInput, StepRun, document_label

SHORTEST, LONGEST = 9, 2048  # the number of characters of a URL
# The file lists sites of pictures, sound, video, programs, shops, short links and log-ins, with or without the public
# suffix, and the suffixes of files that are not pages.
BLACKLIST = Path(__file__).with_name("blacklist.json")
LANGUAGE_CHARACTERS = 3000  # number of characters of a text that the language detection reads, at 4 MB/s
# the characters that ftfy may change: all except printable ASCII without the ampersand
SUSPECT = re.compile(r"[^\t\n\x20-\x25\x27-\x7e]")
WORDS = 13
WORD = re.compile(r"\w+")
SPLITS = ("train", "valid", "test")


def normalize_url(url: str) -> str:
    """Remove the fragment and the default port of a URL, and write its host in lower case. Fragment, default port and
    case of the host do not change the page. Raises ValueError if the URL has no host or an invalid port."""
    parts = urlsplit(url)
    if not parts.hostname:
        raise ValueError("no host")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    port = "" if parts.port in (None, {"http": 80, "https": 443}.get(parts.scheme)) else f":{parts.port}"
    return urlunsplit((parts.scheme.lower(), host + port, parts.path or "/", parts.query, ""))


def duplicate_key(url: str) -> str:
    """Return the URL without its scheme, "www." and a final slash. URLs with the same key usually lead to one page."""
    parts = urlsplit(url)
    return f"{parts.netloc.removeprefix('www.')}{parts.path.rstrip('/')}?{parts.query}"


def make_url_filter() -> Callable[[str], str | None]:
    """Make a function that returns the reason not to download a URL, or None."""
    import tldextract

    blacklist = json.loads(BLACKLIST.read_text(encoding="utf-8"))
    sites, extensions = set(blacklist["sites"]), set(blacklist["extensions"])
    # tldextract contains a list of public suffixes. With these arguments, tldextract uses no network and no cache.
    extract = tldextract.TLDExtract(suffix_list_urls=(), cache_dir=None)

    def reason(url: str) -> str | None:
        if not SHORTEST <= len(url) <= LONGEST:
            return "too short" if len(url) < SHORTEST else "too long"
        try:
            parts = urlsplit(normalize_url(url))
        except ValueError:
            return "malformed"
        if re.search(r"[\s\x00-\x1f\x7f<>\"]", url):
            return "malformed"
        if parts.scheme not in ("http", "https"):
            return "neither http nor https"
        found = extract.extract_str(parts.hostname or "")
        if not found.suffix or not found.domain:
            return "malformed"  # The host is a local name or a number.
        if found.domain in sites or f"{found.domain}.{found.suffix}" in sites:
            return "site without text"
        _, dot, extension = parts.path.rpartition("/")[2].rpartition(".")
        return "file that is no page" if dot and extension.lower() in extensions else None

    return reason


def filter_urls(run: StepRun) -> None:
    """Filter the URLs of all files, and write files of --urls-per-file URLs. Memory: about 100 bytes for each page,
    for the hash of its URL."""
    reason = make_url_filter()
    seen: set[bytes] = set()
    for url in run.lines():
        why = reason(url)
        if why is None:
            url = normalize_url(url)
            key = hashlib.blake2b(duplicate_key(url).encode("utf-8", "surrogatepass"), digest_size=16).digest()
            why = "duplicate" if key in seen else None
            seen.add(key)
        if why:
            run.drop(why, url[:200])
        else:
            run.file(f"urls_{run.left // run.args.urls_per_file:05d}.txt").write(url.encode() + b"\n")
            run.left += 1


def fix_text(text: str) -> str:
    """Return ftfy.fix_text(text). For speed, only lines that ftfy may change are passed to ftfy."""
    if not SUSPECT.search(text):
        return text
    import ftfy

    lines = re.findall(r"[^\n]*\n|[^\n]+", text)
    unescape: Any = "auto"
    for number, line in enumerate(lines):
        if SUSPECT.search(line):
            lines[number] = ftfy.fix_text(line, unescape_html=unescape)
        if "<" in line:  # After the first tag, ftfy assumes HTML and keeps entities.
            unescape = False
    return "".join(lines)


def detect_language(text: str) -> str:
    """Return the code of the most likely of 97 languages, by the model in py3langid."""
    import py3langid

    return py3langid.classify(text[:LANGUAGE_CHARACTERS])[0]


def cleanup(run: StepRun) -> None:
    """Fix each document with ftfy. Then drop a document that is empty, has fewer than --min-tokens tokens, or is not in
    --language."""
    args = run.args
    tokenizer = build_tokenizer(**args.tokenizer)
    for document in run.documents():
        text = document["text"] = fix_text(document["text"]).strip()
        if not text:
            run.drop("empty once fixed", document)
        elif len(tokenizer.encode(text)) < args.min_tokens:
            run.drop(f"fewer than {args.min_tokens} tokens", document)
        elif args.language != "any" and (found := detect_language(text)) != args.language:
            run.drop(f"not {args.language}", f"{found}: {document_label(document)}")
        else:
            run.write(document)


def word_ngrams(text: str) -> Iterator[tuple[str, ...]]:
    """Yield every 13 consecutive words of `text`, in lower case. Words are letters and digits, so punctuation and white
    space do not matter."""
    words = WORD.findall(text.lower())
    return zip(*(words[start:] for start in range(WORDS)), strict=False)


@functools.lru_cache(1)  # cached, because a process works on many inputs
def evaluation_ngrams(paths: tuple[Path, ...], text_key: str) -> tuple[set[tuple[str, ...]], int]:
    """Return all runs of 13 words in the evaluation texts at `paths`, and the number of texts that are shorter than a
    run. Raises ValueError if no text has 13 words, or if a line has no text under `text_key`."""
    reading = StepRun(argparse.Namespace(text_key=text_key), StepInput("evaluation", paths))
    runs: set[tuple[str, ...]] = set()
    too_short = 0
    for document in reading.documents():
        found = set(word_ngrams(document["text"]))
        runs |= found
        too_short += not found
    if UNREADABLE in reading.dropped:
        raise ValueError(reading.dropped[UNREADABLE]["samples"][0])
    if not runs:
        raise ValueError(f"the evaluation sets hold no text of {WORDS} words")
    return runs, too_short


def decontaminate(run: StepRun) -> None:
    """Drop each document that shares a run of 13 words with a text of --evaluation."""
    runs, _ = evaluation_ngrams(run.args.evaluation_files, run.args.evaluation_key)
    for document in run.documents():
        found = next((words for words in word_ngrams(document["text"]) if words in runs), None)
        if found is None:
            run.write(document)
        else:
            run.drop("in an evaluation set", " ".join(found))


def merge(run: StepRun) -> None:
    """Write all documents of all files, in order, to one file."""
    for document in run.documents():
        run.write(document)


def split(run: StepRun) -> None:
    """Assign each document to a split by the hash of its text and of --seed. A document stays in its split when the
    corpus grows, and equal texts are in the same split."""
    shares = list(map(Fraction, run.args.shares))
    ends = list(itertools.accumulate(shares))  # The last end is the sum of the shares.
    for document in run.documents():
        key = str(run.args.seed).encode()
        digest = hashlib.blake2b(document["text"].encode("utf-8"), digest_size=8, key=key).digest()
        point = Fraction(int.from_bytes(digest, "little"), 2**64) * ends[-1]
        run.write(document, f"{SPLITS[bisect.bisect_right(ends, point)]}.jsonl")
