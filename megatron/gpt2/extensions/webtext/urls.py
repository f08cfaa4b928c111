"""Which addresses are worth a download: pages of text, each once."""

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from megatron.gpt2.extensions.webtext.shard_run import ShardRun

SHORTEST, LONGEST = 9, 2048
# Sites of pictures, sound, video, programs, shops, short links and log-ins, by their name before the public suffix or
# with it; and endings of files that are no pages.
BLACKLIST = Path(__file__).with_name("blacklist.json")


def normal(url: str) -> str:
    """The address without what a server never sees: the fragment, the case of the host, the scheme's own port.
    ValueError where it has no host or an impossible port."""
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

    # The list of public suffixes that comes with the library: no network, no cache.
    blacklist = json.loads(BLACKLIST.read_text(encoding="utf-8"))
    sites, extensions = set(blacklist["sites"]), set(blacklist["extensions"])
    extract = tldextract.TLDExtract(suffix_list_urls=(), cache_dir=None)

    def reason(url: str) -> str | None:
        if len(url) < SHORTEST:
            return "too short"
        if len(url) > LONGEST:
            return "too long"
        if re.search(r"[\s\x00-\x1f\x7f<>\"]", url):
            return "malformed"
        try:
            parts = urlsplit(normal(url))
        except ValueError:
            return "malformed"
        if parts.scheme not in ("http", "https"):
            return "neither http nor https"
        found = extract.extract_str(parts.hostname or "")
        if not found.suffix or not found.domain:
            return "malformed"  # an address in a local network, or a number
        if found.domain in sites or f"{found.domain}.{found.suffix}" in sites:
            return "site without text"
        name = parts.path.rpartition("/")[2]
        if "." in name and name.rpartition(".")[2].lower() in extensions:
            return "file that is no page"
        return None

    return reason


def filter_urls(run: ShardRun, *, urls_per_file: int, blacklist: str) -> None:
    """Addresses, one a line, of all files; those that go on into files of `urls_per_file`, which are the shards of the
    download. A hash of every page is held in memory, about 100 bytes each. `blacklist`, its sha256, is recorded."""
    reason = refusal()
    seen: set[bytes] = set()
    for url in run.lines():
        why = reason(url)
        if why is None:
            url = normal(url)
            key = hashlib.blake2b(page_key(url).encode("utf-8", "surrogatepass"), digest_size=16).digest()
            if key not in seen:
                seen.add(key)
                run.file(f"urls_{run.left // urls_per_file:05d}.txt").write(url.encode() + b"\n")
                run.left += 1
                continue
            why = "duplicate"
        run.drop(why, url[:200])
