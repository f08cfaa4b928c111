"""Test the programs of tools/openwebtext: with bad input, without a network, on Slurm, and all programs in sequence on
a simulated web."""

from __future__ import annotations

import http.server
import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import pytest

from megatron.gpt2.extensions.webtext import commands
from tests.conftest import ROOT, error_line, needs

pytestmark = needs("py3langid", "trafilatura", "datatrove", "pebble", extra="curate")
TOOLS = ROOT / "tools" / "openwebtext"
STORY = (
    "This is a story of a small town by the sea, where the harbour was full of boats and nobody was in a hurry. "
    "Every morning the fishermen went out, and every evening they came back with what they had caught. "
) * 8


def program(name: str, *arguments: Path | str) -> None:
    """Run the program in this process, which has loaded the libraries."""
    getattr(commands, name)([*map(str, arguments)])


def run(name: str, *arguments: Path | str, **environment: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, str(TOOLS / f"{name}.py"), *map(str, arguments)]
    return subprocess.run(words, text=True, capture_output=True, env={**os.environ, **environment}, timeout=240)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a current folder with files of scraped text and of JSON lines."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ".cache"))
    Path("texts").mkdir()
    for number in range(6):
        Path(f"texts/{number}.txt").write_text(f"Chapter {number}. " + STORY if number else "short")
    Path("lines").mkdir()
    for file in range(3):
        lines = [json.dumps({"text": f"Tale {file}, {number}. {STORY}"}) + "\n" for number in range(3)]
        Path(f"lines/{file}.jsonl").write_text("".join(lines))
    Path("evaluation.txt").write_text("Nothing of these words is in the other texts, however long one looks for them.")


def test_file_names_of_2019_from_addresses_to_a_data_set():
    """An OUTPUT whose name ends in .json is one file. Any other OUTPUT is a folder."""
    Path("urls.txt").write_text("\ufeffhttp://a.org/1\nhttp://a.org/1\nhttp://b.org/2\n")
    program("blacklist_urls", "urls.txt", "clean_urls.txt", "--urls-per-file", "1")
    assert Path("clean_urls.txt").read_text() == "http://a.org/1\nhttp://b.org/2\n"
    with open("lines/2.jsonl", "a") as file:
        file.write(json.dumps({"text": f"Tale 1, 1. {STORY}"}) + "\n")  # a duplicate
    program("cleanup_dataset", "lines", "clean.json", "--workers", "1")  # Three files become one.
    program("find_duplicates", "clean.json", "duplicates.json", "--min-jaccard", "1")
    program("group_duplicate_url", "duplicates.json", "groups.json")
    program("remove_group_duplicates", "groups.json", "clean.json", "unique.json")
    program("cleanup_dataset", "lines", "folder", "--workers", "1")
    assert not list(Path().glob("*.shards")) and len(list(Path().glob("folder/*.jsonl"))) == 3
    kept = [json.loads(line)["text"] for line in Path("unique.json").read_text().splitlines()]
    assert len(kept) == 9 and len(set(kept)) == 9


@pytest.mark.parametrize(
    "line, words",
    {
        "cleanup_dataset texts out.txt": "out.txt: this step writes a folder, or a file whose name ends in .json or",
        "cleanup_dataset lines/1.jsonl lines/1.jsonl": "lines/1.jsonl is a file of the input",
        "cleanup_dataset texts out --limit 0": "--limit: must be at least 1, not 0",
        "cleanup_dataset texts out --executor slurm": "--slurm-partition",
        "cleanup_dataset texts out --executor local --limit 3": "--limit",
        "download_urls texts out --page-seconds nan": "--page-seconds",
        "group_duplicate_url texts out": "give one file, pairs.jsonl",
        "filter_ngrams texts out --evaluation nowhere.txt": "nowhere.txt",
        "filter_ngrams texts out --evaluation lines --evaluation-key body": "lines/0.jsonl:1: no field 'body'",
    }.items(),
)
def test_bad_input_is_one_line_and_writes_nothing(line: str, words: str):
    before = sorted(Path().rglob("*"))
    assert words in error_line(lambda: program(*line.split()))
    assert sorted(Path().rglob("*")) == before


def test_results_without_a_network_are_not_recorded(monkeypatch: pytest.MonkeyPatch):
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    Path("urls.txt").write_text("http://a.invalid/1\nhttp://b.invalid/2\n")
    with pytest.raises(OSError, match="is there a network"):
        program("download_urls", "urls.txt", "out")
    assert not list(Path("out").rglob("*.json*"))


def test_slurm(capsys: pytest.CaptureFixture[str]):
    """A fake Slurm runs the array job that datatrove submits."""
    programs = {
        "sbatch": 'cat "${@: -1}" > job; last=$(sed -n "s/^#SBATCH --array=0-\\([0-9]*\\).*/\\1/p" job)\n'
        "if grep -q launch_pickled job; then for rank in $(seq 0 $last); do\n"
        "SLURM_ARRAY_TASK_ID=$rank SLURM_NODELIST=here RUN_OFFSET=0 bash job >&2; done; fi\n"
        "echo Submitted batch job 7\n",
        "srun": 'shift 3; exec "$@"\n',
        "scontrol": "echo here\n",
    }
    Path("bin").mkdir()
    for name, text in programs.items():
        Path("bin", name).write_text(f"#!/bin/bash\n{text}")
        Path("bin", name).chmod(0o755)
    flags = "--executor slurm --slurm-partition cpu --tasks 2".split()
    found = run("cleanup_dataset", "lines", "out", *flags, PATH=f"{Path('bin').resolve()}:{os.environ['PATH']}")
    assert found.returncode == 0 and "submitted to Slurm" in found.stdout, found.stderr
    assert sorted(path.name for path in Path("out").glob("*.jsonl")) == ["0.jsonl", "1.jsonl", "2.jsonl"]
    program("cleanup_dataset", "lines", "out")
    assert "9 in, 9 out" in capsys.readouterr().out


ENGLISH = """the of and to in is was that for on with as it by at from his her they which or we an were been has would
what will there if can all who more when no out said about time people into your could than first other after water
through world still between never under last might great house again river morning light garden music letter winter
village doctor teacher window kitchen journey story question answer history science country language weather bridge
island forest animal machine engine station library quietly slowly suddenly brought thought looked walked
wanted""".split()
GERMAN = """der die das und ein eine nicht mit auf für von dem sich auch werden haben immer niemals Straße Fenster
Garten Morgen Licht Winter Sommer Schule Reise Geschichte Antwort Sprache Brücke Insel Wald Maschine
Bücherei langsam""".split()
EVALUATION = "One evening the old lighthouse keeper counted seventeen green lanterns drifting past the broken harbour"
FLAGS = {
    "URLS_FLAGS": "--urls-per-file 15",
    "SPLIT_FLAGS": "--split 60,20,20",
    "DOWNLOAD_FLAGS": "--max-bytes 1000000 --page-seconds 60 --extract-seconds 120 --threads 16 --per-host 8",
}

Answer = tuple[bytes, int, dict[str, str]]  # body, status and headers


def paragraphs(seed: str, words: list[str] = ENGLISH, count: int = 7) -> list[str]:
    draw = random.Random(seed)
    sentences = [" ".join(draw.choices(words, k=draw.randint(8, 16))).capitalize() + "." for _ in range(4 * count)]
    return [" ".join(sentences[first : first + 4]) for first in range(0, len(sentences), 4)]


def html(texts: list[str], title: str = "A page") -> bytes:
    links = "".join(f'<li><a href="/section/{number}">Section {number}</a></li>' for number in range(12))
    return (
        f"<!DOCTYPE html><html><head><title>{title}</title><script>var tracker = 1;</script></head><body>"
        f"<nav><ul>{links}</ul></nav><article><h1>{title}</h1>{''.join(f'<p>{text}</p>' for text in texts)}</article>"
        "<footer>Copyright. All rights reserved. Subscribe to our newsletter.</footer></body></html>"
    ).encode()


LATIN = "Café, naïve, façade, £5."


class Kind(NamedTuple):
    """A kind of page.

    pages: the number of pages.
    body: returns the content for a seed.
    part: text that must be in the corpus, or "" if the pages must not be there.
    """

    pages: int
    body: Callable[[str], bytes] = lambda seed: html(paragraphs(seed))
    part: str = ""
    status: int = 200
    headers: Mapping[str, str] = MappingProxyType({})


KINDS = {
    "article": Kind(16, part="{first}"),
    "latin": Kind(
        1,
        lambda seed: html([*paragraphs(seed), LATIN]).decode().encode("cp1252"),
        LATIN,
        headers={"Content-Type": "text/html; charset=cp1252"},
    ),
    # The text is UTF-8 that was once read as Latin-1. The server names a wrong encoding.
    "mojibake": Kind(
        1,
        lambda seed: html([*paragraphs(seed), "The cafÃ© was schÃ¶n."]),
        "The café was schön.",
        headers={"Content-Type": "text/html; charset=ascii"},
    ),
    "redirect": Kind(1, part="{first}", status=301, headers={"Location": "http://news8.example.com/moved/0"}),
    "zcopy": Kind(4, lambda seed: html([*paragraphs(seed), "Indeed."], "A page copied")),
    "foreign": Kind(3, lambda seed: html(paragraphs(seed, GERMAN))),
    "short": Kind(2, lambda seed: html(paragraphs(seed, count=1)[: seed.endswith("1")])),
    "quoted": Kind(2, lambda seed: html([*paragraphs(seed), f"{EVALUATION}."])),
    "gone": Kind(2, status=404),
    "inside": Kind(1, status=302, headers={"Location": "http://169.254.169.254/secret"}),
}
PAGES: dict[str, Answer] = {
    "http://news8.example.com/moved/0": (html(paragraphs("redirect0")), 200, {"Content-Type": "text/html"})
}
GOOD: dict[str, str] = {}
for name, kind in KINDS.items():
    for number in range(kind.pages):
        url, seed = (
            f"http://news{number % 3}.example.com/{name}/{number}",
            f"{name}{number}".replace("zcopy", "article"),
        )
        PAGES[url] = kind.body(seed), kind.status, {"Content-Type": "text/html", **kind.headers}
        if kind.part:
            GOOD[url] = kind.part.format(first=paragraphs(seed)[0])
URLS = [url for url in sorted(PAGES) if "/moved/" not in url]
BAD_URLS = [
    "http://www.youtube.com/watch?v=1",
    "http://news1.example.com/picture.JPG",
    "not an address",
    "http://10.0.0.1/a",
]
# These URLs are duplicates of URLs above.
BAD_URLS += [URLS[0] + "#part", URLS[1].replace("http://", "https://www."), URLS[2] + "/"]


@contextmanager
def web() -> Iterator[str]:
    """Start a proxy that answers for all sites, and yield its URL."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body, status, headers = PAGES.get(self.path, (b"", 404, {}))
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            with suppress(OSError):
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def read_lines(*paths: Path) -> list[dict[str, str]]:
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def test_the_right_documents_survive(tmp_path: Path):
    folder, flags = tmp_path, "--urls urls.txt --output once --evaluation evaluation.jsonl --workers 1"
    (folder / "urls.txt").write_text("\n".join([*URLS, *BAD_URLS]) + "\n")
    (folder / "evaluation.jsonl").write_text(json.dumps({"text": f"Before. {EVALUATION}, after."}) + "\n")
    command = ["bash", str(ROOT / "scripts/prepare_openwebtext.sh"), *flags.split()]
    with web() as proxy:
        environment = {**os.environ, **FLAGS, "OMP_NUM_THREADS": "1", "http_proxy": proxy, "no_proxy": ""}
        environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment.pop("HTTP_PROXY", None)
        done = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=240)
    said = done.stdout
    assert done.returncode == 0, said + done.stderr
    found = {document["url"]: document["text"] for document in read_lines(folder / "once/8-merged/corpus.jsonl")}
    assert set(found) == set(GOOD)
    for url, part in GOOD.items():
        assert part in found[url], url
        assert not any(word in found[url] for word in ("newsletter", "Section", "tracker"))
    records = read_lines(*(folder / "once/2-pages/records").iterdir())
    results = {record["url"].partition(".com/")[2]: record["result"] for record in records}
    assert len(results) == len(URLS)
    assert (results["inside/0"], results["gone/1"]) == ("redirected: malformed", "status 404")
    for line in ("  duplicate ", "  site without text ", "  status 404 ", "  not en ", "  in an evaluation set "):
        assert line in said
    names = {name: f"once/9-split/{name}.jsonl" for name in ("train", "valid", "test")}
    splits = [len(read_lines(folder / path)) for path in names.values()]
    assert sum(splits) == len(GOOD) and min(splits) > 0
    flags = " ".join(f"--{name}-data {path}" for name, path in names.items())
    assert said.rstrip().endswith(f"bash scripts/pretrain_gpt2.sh {flags}")
