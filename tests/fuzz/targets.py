"""All readers of external input: native checkpoints and those of other programs, text, token files, tokenizers, files
of runs, and requests to the server."""

from __future__ import annotations

import argparse
import functools
import gzip
import hashlib
import json
import math
import pickle
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

from data_utils.corpora import default_key, read_corpora, read_documents
from data_utils.files import CHECKSUM_ENTRY, append_checksum
from data_utils.indexed_dataset import TokenFile, open_token_file
from data_utils.preprocessing.inputs import cut_into_shards, records, whole_file
from data_utils.tokenizers import build_tokenizer, load_tokenizer
from data_utils.tokenizers.base import ByteTokenizer, Tokenizer, read_characters, train_sentencepiece
from data_utils.tokenizers.gpt2 import BUILTIN_FILE, END_OF_TEXT, builtin_tokenizer
from megatron.gpt2.checkpoint.interface import BaseCheckpoint
from megatron.gpt2.checkpoint.reader import MANIFEST, NativeCheckpoint
from megatron.gpt2.checkpoint.writer import manifest_bytes
from megatron.gpt2.commands import inspect_data
from megatron.gpt2.config import Config, ModelConfig, compat, read_config, write_config
from megatron.gpt2.extensions.serve.app import error_response
from megatron.gpt2.extensions.serve.request import (
    ApiError,
    CompletionRequest,
    ServedModel,
    read_megatron_request,
    read_request,
)
from megatron.gpt2.extensions.webtext.step import StepInput, StepRun
from megatron.gpt2.formats import Hints, open_checkpoint
from megatron.gpt2.formats.openai_tokenizer import open_tokenizer, tokenizer_files
from megatron.gpt2.formats.torch_files import load_torch_file
from megatron.gpt2.generate.generation import GeneratedToken
from megatron.gpt2.model.gpt2 import model_partition_specs
from megatron.gpt2.monitor.html_report import render_page
from megatron.gpt2.monitor.incidents import IncidentLog, rank_file_name, read_incidents
from tests.data_utils.data_files import write_lines, write_pair
from tests.data_utils.test_preprocessing import run, some_texts
from tests.fuzz.fuzzing import Files, Target
from tests.megatron.gpt2.checkpoint.saved_states import find, save
from tests.megatron.gpt2.config.test_compat import WHOLE
from tests.megatron.gpt2.formats.crafted import with_index
from tests.megatron.gpt2.formats.sample_checkpoints import (
    ARCHIVE,
    SHAPE,
    nanogpt_checkpoint,
    openai_state,
    random_weights,
    silent,
    unpack,
    write_huggingface,
    write_megatron,
)

# --- checkpoints

NO_HINTS, HEADS = Hints(), Hints(num_attention_heads=SHAPE.num_attention_heads)
ITERATION = "iter_0000007"
CHECKSUM_KEY = b'"sha256": "'
VERSION_1 = Path(__file__).parents[1] / "megatron/gpt2/checkpoint/version_1.tar.gz"


def save_seven(folder: Path) -> None:
    save(folder, 7)


def read_saved(folder: Path) -> None:
    found, _ = find(folder)
    assert found == 7


def read_any(folder: Path) -> None:
    """Read the newest iteration without checking hashes. Each tensor is refused or has the shape in the manifest, and
    no tensor is larger than all files."""
    checkpoint = NativeCheckpoint(next(folder.glob("iter_*")))
    if problem := checkpoint.find_damage(check_hashes=False):
        raise ValueError(problem)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    for name in checkpoint.tensors:
        info = checkpoint.tensors[name]
        assert math.prod(info.shape) * info.dtype.itemsize <= size, f"{name} {info}"
        assert checkpoint.read(name).shape == info.shape


def update_checksum(files: Files) -> None:
    name = next(name for name in files if name.endswith(MANIFEST))
    body, _, _ = files[name].rpartition(CHECKSUM_KEY)
    files[name] = append_checksum((body or files[name]) + CHECKSUM_KEY)


def update_table_hashes(files: Files) -> None:
    """Rebuild the manifest for the changed tables, or update only the tables' hashes if a table cannot be parsed."""
    name = f"{ITERATION}/{MANIFEST}"
    manifest, tables = json.loads(files[name]), sorted(name for name in files if "/tables/" in name)
    for table in tables:
        data = files[table]
        manifest["tables"][f"tables/{Path(table).name}"].update(
            bytes=len(data), sha256=hashlib.sha256(data).hexdigest()
        )
    try:
        files[name] = manifest_bytes(7, manifest["metadata"], [files[table] for table in tables])
    except (ValueError, TypeError, LookupError, AttributeError, AssertionError, RecursionError):
        files[name] = json.dumps(manifest).encode()
        update_checksum(files)


def read_external(folder: Path, hints: Hints = NO_HINTS) -> None:
    """Check that every tensor has the shape of the model in the metadata."""
    source: BaseCheckpoint = open_checkpoint(folder, hints, log=silent)
    specs = model_partition_specs(ModelConfig(**source.metadata["config"]["model"]))
    for name in source.tensors:
        shape = specs[name.partition(".")[2]].global_shape
        assert source.read(name).shape == source.tensors[name].shape == shape, name


def pickled(legacy: bool, folder: Path) -> None:
    """Write a file with all kinds of objects that real files contain."""
    base = torch.arange(48.0).view(6, 8)
    held = {
        "model": {"decoder.final_layernorm.bias": torch.ones(4)},
        5: {0.5: None},
        "views": (base, base.t(), base[2:4, 1:3], torch.empty(0, 3), torch.tensor(3.5)),
        "set": {1, 2},
        "args": argparse.Namespace(lr=1.0, dtype=torch.float16),
        "numpy": np.arange(3),
        "parameter": torch.nn.Parameter(base),
        "plain": ["é\n", -(2**70), None, True, 1, 255, 65535, 2**31],
    }
    torch.save(held, folder / "x.pt", _use_new_zipfile_serialization=not legacy)


def read_pickled(folder: Path) -> None:
    """Check that no tensor has more elements than the file has bytes, and that each tensor can be read."""
    path = folder / "x.pt"
    seen: set[int] = set()

    def visit(value: Any) -> None:
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            assert value.numel() <= path.stat().st_size
            value.double().sum()
        elif isinstance(value, (dict, list, tuple)):
            for inner in value.values() if isinstance(value, dict) else value:
                visit(inner)

    visit(load_torch_file(path))


def plain_dcp(folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that only one process saves, which is intended here.
        save_dcp({"model": openai_state(random_weights(), transposed=True)}, checkpoint_id=folder, no_dist=True)


def megatron(form: str, version: int, legacy: bool = False) -> Callable[[Path], object]:
    return lambda folder: write_megatron(folder, random_weights(), form, version=version, tp=2, legacy=legacy)


def shards(folder: Path) -> None:
    names = dict.fromkeys(openai_state(random_weights(), transposed=True), "model-1.safetensors")
    index = {"metadata": {"total_size": 1}, "weight_map": names}
    (with_index(names, folder) / "model.safetensors.index.json").write_text(json.dumps(index))


read_dcp = functools.partial(read_external, hints=HEADS)
TARGETS = [
    Target("checkpoint", save_seven, read_saved),
    Target("checkpoint: manifest behind its seal", save_seven, read_any, f"{ITERATION}/{MANIFEST}", update_checksum),
    Target(
        "checkpoint: tables behind their hashes", save_seven, read_any, f"{ITERATION}/tables/*", update_table_hashes
    ),
    Target(
        "checkpoint: manifest of version 1",
        lambda folder: shutil.unpack_archive(VERSION_1, folder, filter="data"),
        read_any,
        f"iter_0000003/{MANIFEST}",
        update_checksum,
    ),
    Target("checkpoint: safetensors without hashes", save_seven, read_any, "**/*.safetensors"),
    Target("Hugging Face: config.json", write_huggingface, read_external, "config.json"),
    Target("Hugging Face: safetensors", write_huggingface, read_external, "*.safetensors", model=True),
    Target("Hugging Face: index", shards, read_external, "*.index.json"),
    Target(".pt zip", functools.partial(pickled, False), read_pickled),
    Target(".pt legacy", functools.partial(pickled, True), read_pickled),
    Target(
        "nanoGPT", lambda folder: torch.save(nanogpt_checkpoint()[0], folder / "ckpt.pt"), read_external, model=True
    ),
    Target("Megatron, flat", megatron("flat", 0), read_external, model=True),
    Target("Megatron v2, legacy .pt", megatron("v2", 3, legacy=True), read_external, model=True),
    Target("Megatron Core", megatron("fused", 3), read_external, model=True),
    Target("torch_dist", functools.partial(unpack, ARCHIVE, "plain-0.16.1"), read_external, model=True),
    Target(
        "torch_dist: .metadata",
        functools.partial(unpack, ARCHIVE, "fully_reshardable_dp2-0.16.1"),
        read_external,
        "**/.metadata",
        model=True,
    ),
    Target("DCP", plain_dcp, read_dcp, model=True),
    Target("DCP: .metadata", plain_dcp, read_dcp, ".metadata", model=True),
]


# --- text, token files and tokenizers

SAMPLE = "Once upon a time,\n there were  12 foxes; éàü \N{SNOWMAN} — don't!\t"
LINES = [
    {"text": "a document"},
    {"text": ""},
    {"text": SAMPLE, "meta": {"pile": [1, 2.5, None, True]}},
    {"url": "https://example.org/é", "text": "\N{PILE OF POO} text\n" * 5},
    {"sentence": "other"},
]


def jsonl(name: str, pack: Callable[[bytes], bytes] = bytes, array: bool = False) -> Callable[[Path], object]:
    content = json.dumps(LINES, indent=1) if array else "\n".join(map(json.dumps, LINES * 3))
    return lambda folder: (folder / name).write_bytes(pack(content.encode()))


def zstd(data: bytes) -> bytes:
    import pyarrow

    packed: bytes = pyarrow.compress(data, "zstd", asbytes=True)
    return packed


def characters(folder: Path) -> None:
    numbers = dict(enumerate(sorted(set(SAMPLE))))
    meta = {"vocab_size": len(numbers), "itos": numbers, "stoi": {one: number for number, one in numbers.items()}}
    (folder / "meta.pkl").write_bytes(pickle.dumps(meta))


def read_meta(folder: Path) -> None:
    """Check that encoding and decoding all ids gives the same ids."""
    tokenizer = read_characters(str(folder / "meta.pkl"))
    ids = list(range(tokenizer.vocab_size))
    assert list(tokenizer.encode(tokenizer.decode(ids))) == ids


def read_text(folder: Path) -> None:
    """Read the file as training, preprocessing and web text curation do."""
    path = next(folder.iterdir())
    default_key(str(path))
    texts = list(read_documents(str(path), None, silent, 1.0))
    for shard in cut_into_shards([whole_file(str(path), ("text",))]):
        for span in shard:
            for _, record in records(span, ("text",)):
                assert isinstance(record, (bytes, dict, list, str, int, float, type(None)))
    shard_run = StepRun(argparse.Namespace(text_key="text"), StepInput("read", (path,)))
    texts += [document["text"] for document in shard_run.documents()]
    for text in texts:
        assert isinstance(text, str) and text, "no text"
        text.encode("utf-8")  # A lone surrogate raises UnicodeEncodeError.


def pair(folder: Path) -> None:
    write_pair(folder / "a", [[*range(number % 7), 255] for number in range(40)])


def check_tokens(data: TokenFile) -> None:
    """Check that the documents together contain all tokens of the file."""
    starts: NDArray[np.int64] = data.document_starts
    assert starts[0] == 0 and starts[-1] == len(data.tokens) and bool((np.diff(starts) >= 0).all())
    assert sum(len(data[number]) for number in range(len(data))) == len(data.tokens) and len(data.tokens) < 1 << 20


def read_pair(folder: Path) -> None:
    check_tokens(open_token_file(folder / "a", 255))


def read_bin(folder: Path) -> None:
    check_tokens(open_token_file(folder / "a.bin", 255))


def llm_c(folder: Path) -> None:
    head = np.zeros(256, "<i4")
    head[:3] = 20240520, 1, 300
    (folder / "a.bin").write_bytes(head.tobytes() + np.arange(300, dtype="<u2").tobytes())


def preprocessed(folder: Path) -> None:
    run(write_lines(folder / "a.jsonl", some_texts(20)), folder / "a")


def update_pair_checksum(files: Files) -> None:
    name, key = next(name for name in files if name.endswith("document.json")), CHECKSUM_ENTRY.encode()
    body = files[name].rpartition(key)[0] or files[name]
    files[name] = body + key + hashlib.sha256(body).hexdigest().encode() + b'"\n}\n'


def inspect(folder: Path) -> None:
    prefix = str(next(folder.glob("*_document.idx")).with_suffix(""))
    for flags in ([], ["--verify"]):
        assert inspect_data.main([prefix, *flags]) in (0, 1)


def check_tokenizer(tokenizer: Tokenizer, *, lossless: bool = True) -> None:
    """Check that all ids are in the vocabulary, that none is the end of a document, and that they decode to the
    text."""
    ids = np.asarray(tokenizer.encode(SAMPLE), dtype=np.int64)
    assert len(ids) == 0 or 0 <= ids.min() <= ids.max() < tokenizer.vocab_size
    assert 0 <= tokenizer.eod < tokenizer.vocab_size
    text = tokenizer.decode(ids)
    assert not lossless or (text == SAMPLE and tokenizer.eod not in ids)


def gpt2_files(folder: Path) -> None:
    files, problem = tokenizer_files(build_tokenizer("bytes"), 1024)
    assert not problem
    vocabulary, pairs = json.loads(files["vocab.json"]), ["t h", "th e", "\u0120 t", "\u0120t h", "i n", "e r"]
    for merge in pairs:
        vocabulary[merge.replace(" ", "")] = len(vocabulary)
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *pairs, ""]))


def read_gpt2(folder: Path) -> None:
    check_tokenizer(
        build_tokenizer(
            "GPT2BPETokenizer", vocab_file=str(folder / "vocab.json"), merge_file=str(folder / "merges.txt")
        )
    )


def huggingface_tokenizer(folder: Path) -> None:
    from tokenizers import ByteLevelBPETokenizer

    gpt2_files(folder)
    tokenizer = ByteLevelBPETokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"))
    tokenizer.add_special_tokens([END_OF_TEXT])
    tokenizer.save(str(folder / "tokenizer.json"))


def sentencepiece_model(folder: Path) -> None:
    train_sentencepiece(["the cat sat on the mat. " * 20, SAMPLE * 20], folder / "sp.model", 320)


TARGETS += [
    Target("JSONL", jsonl("a.jsonl"), read_text),
    Target("JSON array", jsonl("a.json", array=True), read_text),
    Target("JSONL, gzip", jsonl("a.jsonl.gz", lambda data: gzip.compress(data, mtime=0)), read_text),
    Target("JSONL, zstd", jsonl("a.jsonl.zst", zstd), read_text),
    Target("text", jsonl("a.txt"), read_text),
    Target(
        "named corpora",
        lambda folder: (folder / "corpora.json").write_text(
            '{"small": {"files": ["a.txt", "b.jsonl"], "text_key": "text"}, "other": {"files": ["c"]}}'
        ),
        lambda folder: read_corpora(folder / "corpora.json"),
    ),
    Target(".idx", pair, read_pair, "*.idx"),
    Target(".bin", pair, read_pair, "*.bin"),
    Target(".bin of llm.c", llm_c, read_bin),
    Target("pair's manifest behind its seal", preprocessed, inspect, "*_document.json", update_pair_checksum),
    Target("vocabulary and merges", gpt2_files, read_gpt2),
    Target(
        "tokenizer.json",
        huggingface_tokenizer,
        lambda folder: check_tokenizer(open_tokenizer({"tokenizer.json": str(folder / "tokenizer.json")})),
        "tokenizer.json",
    ),
    Target(
        "builtin_bpe.json",
        lambda folder: builtin_tokenizer().save(folder),
        lambda folder: check_tokenizer(builtin_tokenizer(folder / BUILTIN_FILE)),
        BUILTIN_FILE,
    ),
    Target("meta.pkl", characters, read_meta),
    Target(
        "tokenizer of a checkpoint",
        lambda folder: builtin_tokenizer().save(folder),
        lambda folder: check_tokenizer(load_tokenizer(folder)),
    ),
    Target(
        "SentencePiece model",
        sentencepiece_model,
        lambda folder: check_tokenizer(
            build_tokenizer("SentencePieceTokenizer", model_file=str(folder / "sp.model")), lossless=False
        ),
    ),
]


# --- runs and requests

TOKENIZER = ByteTokenizer()
SERVED = ServedModel("tiny", TOKENIZER, context=64, max_tokens=100, max_texts=8, max_body_bytes=1 << 16)


def run_folder(folder: Path) -> None:
    config = Config.from_dict({"checkpoint": {"save": "checkpoints/a"}})
    run_values = {"global_batch_size": 8, "train_iters": 100, "environment": {"torch": "2"}}
    write_config(folder, config, run_values, continues=False)
    line = """{"iteration": %d, "lm_loss": 5.0, "learning_rate": 1e-3, "consumed_samples": 8, "ms_per_iteration": 10.0,
        "tokens_per_second": 1e4, "grad_norm": 1.0, "memory_bytes": 1000000000}""".replace("\n", "")
    evaluated = '{"iteration": 5, "split": "valid", "lm_loss": 2.0, "bits_per_byte": 1.0}'
    for name, lines in {
        "metrics": [*(line % number for number in range(1, 6)), evaluated],
        "samples": ['{"iteration": 5, "text": "[Once] upon"}'],
        "history": ['{"iteration": 0, "time": "2026-01-01T00:00:00+00:00", "text": "started"}'],
    }.items():
        (folder / f"{name}.jsonl").write_text("".join(f"{one}\n" for one in lines))
    IncidentLog(folder, rank_file_name(0)).note("start", "2 ranks", iteration=0)
    IncidentLog(folder, "launcher_a").note("rank ended", "rank 1 was ended by SIGKILL", rank=1, signal=9)


def read_run(folder: Path) -> None:
    """Check that the incidents are sorted by time, and draw the report."""
    times = [record["time"] for record in read_incidents(folder)]
    assert times == sorted(times)
    assert render_page(folder).startswith("<!DOCTYPE html>")


def deepspeed_file(folder: Path) -> None:
    (folder / "ds.json").write_text(WHOLE)


def read_deepspeed(folder: Path) -> None:
    values, _, notes, _ = compat.read_deepspeed_config(str(folder / "ds.json"), {"train.micro_batch_size": 4})
    assert all("." in key for key in values) and all("\n" not in note for note in notes)


BODY = r"""
{"model": "tiny", "prompt": ["Once upon", "a time"], "max_tokens": 20, "temperature": 0.7, "top_p": 0.9, "top_k":
3, "n": 2, "stop": ["\n", "x"], "seed": 7, "logprobs": 2, "stream": true, "echo": true, "user": "me",
"stream_options": {"include_usage": true}, "repetition_penalty": 1.2, "logit_bias": {}, "best_of": 1}"""
MEGATRON_BODY = """
{"prompts": ["Once upon", "a time: "], "tokens_to_generate": 20, "logprobs": true, "temperature": 0.7, "top_k": 0,
"top_p": 0.9, "top_p_decay": 0.0, "top_p_bound": 0.5, "add_BOS": true, "stop_on_eol": false, "stop_on_double_eol":
true, "prevent_newline_after_colon": false, "random_seed": 7, "no_log": true, "stop_token": 256, "length_penalty":
1.0, "beam_width": null}"""


def body_target(name: str, body: str, read: Callable[[bytes, ServedModel], CompletionRequest]) -> Target:
    """Return the target of a request body for one of the server's endpoints."""
    return Target(
        name,
        lambda folder: (folder / "body").write_text(body),
        lambda folder: read_body(folder, read),
        refusals=(ApiError,),
        named=False,
    )


def read_body(folder: Path, read: Callable[[bytes, ServedModel], CompletionRequest]) -> None:
    """Check that an accepted request can be generated and answered, and that a refused one gets an answer in JSON."""
    try:
        request = read((folder / "body").read_bytes(), SERVED)
    except ApiError as error:
        assert error.status in (400, 404)
        json.loads(bytes(error_response(error).body))
        raise
    assert 1 <= len(request.texts) <= SERVED.max_texts
    logits = torch.linspace(-5, 5, TOKENIZER.vocab_size)
    for text in request.texts:
        c = text.c
        assert len(c.prompt) <= SERVED.context and all(0 <= i < TOKENIZER.vocab_size for i in c.prompt)
        assert c.sampling.max_new_tokens <= SERVED.max_tokens
        c.context, c.prompt_tokens = [*c.prompt], [GeneratedToken(0, i, 0.5) for i in c.prompt[1:] if c.score_prompt]
        text.add(c.next(logits, logits.logsumexp(0), TOKENIZER))
    json.dumps(request.answer(TOKENIZER, {}), allow_nan=False)


TARGETS += [
    Target("records of a run", run_folder, read_run, "**/*.jsonl", model=True),
    Target("config.json", run_folder, lambda folder: read_config(str(folder / "config.json")), "config.json"),
    Target("config.json of a report", run_folder, read_run, "config.json", model=True),
    Target("DeepSpeed's file", deepspeed_file, read_deepspeed),
    body_target("HTTP body", BODY, read_request),
    body_target("HTTP body in Megatron's form", MEGATRON_BODY, read_megatron_request),
]
