"""Read documents from files of every format, from named corpora and from the built-in corpus."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from data_utils.corpora import default_key, expand_paths, find_corpora, read_documents
from data_utils.corpora.builtin import builtin_documents, prose, texts_of
from tests.data_utils.data_files import BAD_LINES, write

TEXTS = [f"document {number}" for number in range(3)]


def lines(count: int, key: str = "text") -> str:
    return "".join(json.dumps({"id": number, key: f"document {number}"}) + "\n" for number in range(count))


def zstd(data: bytes) -> bytes:
    packed: bytes = pytest.importorskip("pyarrow").compress(data, "zstd", asbytes=True)
    return packed


def read(path: str, text_key: str | None = None) -> tuple[list[str], list[str]]:
    said: list[str] = []
    return list(read_documents(path, text_key, said.append)), said


def test_default_key(tmp_path: Path) -> None:
    content = "\n \n{\n[]\n" + '{"id": 1}\n' + lines(5000, "sentence") + lines(1)
    assert read(write(tmp_path / "a.jsonl", content))[0][0] == "document 0"
    # Without one of the default fields in the first 1000 lines, the file is refused.
    assert default_key(write(tmp_path / "b.jsonl", lines(1000, "body") + lines(1))) is None


def test_plain_text_is_one_unchanged_document(tmp_path: Path) -> None:
    text = 'a\r\nb\n\n\x00\u2028{"text": 1}\n'
    marked = "\ufeff" + text  # A byte-order mark is not part of the text.
    assert read(write(tmp_path / "a.txt", marked))[0] == [text]
    assert read(write(tmp_path / "b.text.gz", gzip.compress(marked.encode())))[0] == [text]
    # A file may have several zstd frames.
    content, skipped = lines(3, "body").encode(), b"\x50\x2a\x4d\x18\x03\0\0\0abc"
    path = write(tmp_path / "a.jsonl.zst", skipped + zstd(content[:20]) + zstd(content[20:]))
    assert read(path, "body")[0] == TEXTS


def test_bad_lines_are_skipped_and_reported(tmp_path: Path) -> None:
    bad = b"".join(line + b"\n" for line in BAD_LINES)
    found, said = read(write(tmp_path / "a.jsonl", lines(12_000).encode() + bad + b'{"text": ""}\n'))
    assert len(found) == 12_000 and "a.jsonl:12001: skipped" in said[1]
    assert said[-1].endswith("of 12013 lines 12 bad and 1 empty ones are skipped")
    found, said = read(write(tmp_path / "b.txt", b"line\n" * 2000 + b"\xff\n" + b"line\n"))
    assert found == ["line\n" * 2001] and "b.txt:2001" in said[0] and "of 2002 lines 1 bad" in said[1]


@pytest.mark.parametrize(
    "name, content, key, said",
    [
        ("a.jsonl", lines(10) + "{\n", None, r"a\.jsonl:11: .*1 of 11 lines.*--max-bad-fraction 0\.001: .*--text-key"),
        ("a.jsonl", lines(3000), "body", r"a\.jsonl:1: no field 'body', .* 'id', 'text'; .*--text-key"),
        ("a.txt", b"one\n\xe9t\xe9\n", None, r"a\.txt:2: .*convert the file to UTF-8"),
        ("a.txt", b"", None, "holds no text"),
        ("a.json", b'[{"text": "a"},', None, "begins like a JSON array"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, name: str, content: str | bytes, key: str | None, said: str) -> None:
    with pytest.raises(ValueError, match=said) as error:
        read(write(tmp_path / name, content), key)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("pack", [gzip.compress, zstd])
def test_damaged_compression(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    whole = pack(lines(1000).encode())
    for content in (whole[:-1], whole + whole[:100], whole[:40] + bytes(50) + whole[90:]):
        with pytest.raises(ValueError, match=r"a\.jsonl is damaged"):
            read(write(tmp_path / "a.jsonl", content))


def test_a_folder_expands_to_its_files(tmp_path: Path) -> None:
    (tmp_path / "manifests").mkdir()
    for name in ("b.jsonl", "a.json.gz", "c.txt", ".d.jsonl.tmp", ".e.jsonl", "README.md", "manifests/b.md"):
        (tmp_path / name).touch()
    expected = [str(tmp_path / name) for name in ("a.json.gz", "b.jsonl", "c.txt")]
    given = ["builtin", str(tmp_path / "README.md"), str(tmp_path)]
    assert expand_paths(given, "--train-data") == [*given[:2], *expected]
    with pytest.raises(FileNotFoundError, match="--test-data: .*no file of JSON lines or text"):
        expand_paths([str(tmp_path / "manifests")], "--test-data")


# --- named corpora


@pytest.fixture
def corpora(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to a new folder in which data/corpora.json does not exist."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MEGATRON_CORPORA", raising=False)
    (tmp_path / "data" / "wikipedia").mkdir(parents=True)
    for name in ("data/wikipedia/wikidump_lines.json", "own.json", "a.jsonl"):
        (tmp_path / name).touch()
    return tmp_path


def train(*names: str, text_key: str | None = None) -> tuple[tuple[str, ...], str | None]:
    files, key = find_corpora({"--train-data": names}, text_key)
    return files[0], key


def test_a_corpus_name_expands_to_its_files(corpora: Path) -> None:
    files = ("own.json", "data/wikipedia/wikidump_lines.json", "builtin")
    assert train("own.json", "wikipedia", "builtin") == (files, "text") and train("own.json") == (files[:1], None)
    assert train("wikipedia", text_key="body")[1] == "body"
    assert find_corpora({"--train-data": (), "--test-data": ("wikipedia",)}, None) == ([(), files[1:2]], "text")


def test_a_missing_corpus_shows_the_entry_to_write(corpora: Path) -> None:
    entry = r'"webtext": {"files": \["PATH"\], "text_key": "text"} into'
    with pytest.raises(FileNotFoundError, match=f"^--train-data webtext: no such file: data/webtext/.*{entry}"):
        train("webtext")
    with pytest.raises(FileNotFoundError, match='no such file: mycorpus; to define a corpus .* write "mycorpus": '):
        train("mycorpus")
    assert train("none.txt")[0] == ("none.txt",)  # A word with a dot is a path, not the name of a corpus.


def test_corpora_file_in_the_current_folder_or_environment(corpora: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"mine": {"files": ["a.jsonl"], "text_key": "body"}, "plain": {"files": ["own.json"]}}
    write(corpora / "data" / "corpora.json", json.dumps(own))
    assert train("mine") == (("a.jsonl",), "body") and train("plain") == (("own.json",), None)
    with pytest.raises(ValueError, match="mine and plain have their text in different fields: give --text-key"):
        train("mine", "plain")
    monkeypatch.setenv("MEGATRON_CORPORA", write(corpora / "b.json", '{"mine": {"files": ["a.jsonl"]}}'))
    assert train("mine") == (("a.jsonl",), None)
    monkeypatch.setenv("MEGATRON_CORPORA", "nowhere.json")
    with pytest.raises(FileNotFoundError, match=r"\$MEGATRON_CORPORA: no such file: nowhere.json"):
        train("a.jsonl")


# --- the built-in corpus


def test_the_builtin_corpus_is_prose() -> None:
    found, said = read("builtin")
    assert 3e6 < sum(map(len, found)) < 8e6 and not said
    for part in ("Collapse and truncate the given text to fit", "Applies a 2D convolution over an input"):
        assert any(part in text for text in found)


def test_the_builtin_corpus_repeats_nothing() -> None:
    """No split contains text of another split."""
    lines = [line.split() for text in builtin_documents() for line in text.splitlines()]
    count = Counter(run for words in lines for run in {tuple(words[i : i + 13]) for i in range(len(words) - 12)})
    assert len(count) > 200_000 and max(count.values()) == 1


def test_prose_of_docstrings() -> None:
    kept = [
        "Return a new dictionary with the same keys, as the other one has them: see copy_of for more.",
        "A list's item is a paragraph of its own (with its sign taken away), if it is long enough.",
    ]
    docstring = """Make it.

    Return a new *dictionary* with the **same** keys, as
    :class:`the other one <there>` has them: see ``copy_of`` for more.

    >>> len(make_it_of_this_and_that(1, 2, 3, 4, 5, 6, 7))
    Return a new thing, it says in the output of a doctest here.

    - A list's item is a paragraph of its own (with its
      sign taken away), if it is long enough.
    - too short

    +------------+----------------------------------------------+
    | A table of | many words that would be read as a sentence. |

        for each in the_list_of_all_that_is_there: do(each, 12, 13)

    factor ::= "+" factor and some more words of a grammar here.

    x: 12, 13, 14, 15, 16, 17, 18 and A, b_1, b_2, b_3, b_4, b_5.
    Without a final sign, words can go on and on for ever and ever
    """
    assert list(prose(docstring)) == kept


def test_texts_are_found_in_the_source_of_a_module() -> None:
    source = '''"""One."""
x = "# no comment, and \\" not \'\'\' the end"  # none of its own line
def f(a="\\\\"):
    r\'\'\'Two "quoted"
    lines.\'\'\'
    # Three,
    #: four.
    return """no docstring"""
'''
    assert list(texts_of(source)) == ["One.", 'Two "quoted"\n    lines.']
