from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from data_utils import IndexedDatasetBuilder
from data_utils.indexed_dataset import ForeignBin, open_tokens
from data_utils.preprocessing.preprocess import merge

EOD = 50256
DOCUMENTS = [[1, 2, 3, EOD], [40_000, EOD], [*range(30), EOD]]
TOKENS = np.array(sum(DOCUMENTS, []), dtype="<u2")


def llm_c(path: Path, tokens: np.ndarray, **header: int) -> Path:
    head = np.zeros(256, dtype="<i4")
    head[:3] = header.get("magic", 20240520), header.get("version", 1), header.get("count", len(tokens))
    path.write_bytes(head.tobytes() + tokens.tobytes())
    return path


def test_nanogpt_and_llm_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data_utils.indexed_dataset.SEARCHED_AT_ONCE", 5)
    (tmp_path / "nano.bin").write_bytes(TOKENS.tobytes())
    for path, kind in ((tmp_path / "nano.bin", "nanoGPT"), (llm_c(tmp_path / "llm.bin", TOKENS), "llm.c")):
        data = open_tokens(path, EOD)
        assert isinstance(data, ForeignBin) and data.kind == kind and list(data.tokens) == list(TOKENS)
        assert data.document_starts.dtype == np.int64 and [list(data[number]) for number in range(3)] == DOCUMENTS
    (tmp_path / "rest.bin").write_bytes(np.append(TOKENS, 7).astype("<u2").tobytes())
    assert list(open_tokens(tmp_path / "rest.bin", EOD).document_starts) == [0, 4, 6, 37, 38]
    assert len(open_tokens(llm_c(tmp_path / "empty.bin", TOKENS[:0]), EOD).tokens) == 0


def test_what_is_neither_is_refused(tmp_path: Path) -> None:
    for name, content, reason in (
        ("empty", b"", "0 bytes are no uint16"),
        ("odd", b"abc", "3 bytes are no uint16"),
        ("wide", np.arange(40, dtype="<i4").tobytes(), "32-bit tokens.*its .idx is missing"),
    ):
        (tmp_path / f"{name}.bin").write_bytes(content)
        with pytest.raises(ValueError, match=reason):
            open_tokens(tmp_path / f"{name}.bin", EOD)
    for header in ({"count": len(TOKENS) + 1}, {"count": -1}, {"version": 2}, {"count": 2**31 - 1}):
        with pytest.raises(ValueError, match="llm.c's, but its header does not fit"):
            open_tokens(llm_c(tmp_path / "llm.bin", TOKENS, **header), EOD)
    (tmp_path / "short.bin").write_bytes(llm_c(tmp_path / "llm.bin", TOKENS).read_bytes()[:500])
    with pytest.raises(ValueError, match="does not fit its 500 bytes"):
        open_tokens(tmp_path / "short.bin", EOD)


def test_a_pair_by_any_of_its_names_and_never_without_its_index(tmp_path: Path) -> None:
    builder = IndexedDatasetBuilder(tmp_path / "a", TOKENS.dtype)
    for document in DOCUMENTS:
        builder.add(document)
        builder.end_document()
    builder.finish()
    for name in ("a", "a.bin", "a.idx"):
        assert len(open_tokens(tmp_path / name, EOD)) == 3
    (tmp_path / "a.idx").unlink()
    with pytest.raises(FileNotFoundError, match="a.idx"):
        open_tokens(tmp_path / "a", EOD)  # a prefix is one of a pair
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"a.idx, but .*a.json says that it was written"):
        open_tokens(tmp_path / "a.bin", EOD)


def test_merging_all_kinds(tmp_path: Path) -> None:
    (tmp_path / "nano.bin").write_bytes(TOKENS.tobytes())
    builder = IndexedDatasetBuilder(tmp_path / "a", TOKENS.dtype)
    builder.add([5, 6])
    builder.end_document(EOD)
    builder.finish()
    sources = [str(tmp_path / "nano.bin"), str(tmp_path / "a"), str(llm_c(tmp_path / "llm.bin", TOKENS))]
    manifest = merge(sources, str(tmp_path / "all"), EOD)
    data = open_tokens(tmp_path / "all", EOD)
    assert [list(data[number]) for number in range(len(data))] == [*DOCUMENTS, [5, 6, EOD], *DOCUMENTS]
    assert manifest["documents"] == 7 and manifest["tokenizer"] is None
    assert sorted(path.name for path in tmp_path.glob("all*")) == ["all.bin", "all.idx", "all.json"]
    with pytest.raises(ValueError, match="the pair exists"):
        merge(sources, str(tmp_path / "all"), EOD)
    wide = IndexedDatasetBuilder(tmp_path / "wide", np.dtype("<i4"))
    wide.finish()
    with pytest.raises(ValueError, match="holds int32, but .* uint16: they can't be one file"):
        merge([sources[1], str(tmp_path / "wide")], str(tmp_path / "new"), EOD)
    assert not list(tmp_path.glob("new*"))
