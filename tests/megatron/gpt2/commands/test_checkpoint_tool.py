"""Run tools/checkpoint.py and tools/merge_mp_partitions.py on training runs and on genuine old files."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from megatron.gpt2.config.arguments import parse
from megatron.gpt2.dist.ranks import RankInfo
from megatron.gpt2.formats import Hints, open_checkpoint
from megatron.gpt2.train.setup import build_context
from tests.conftest import ROOT, TEST_DATA, error_line, tool
from tests.fork_server import WarmPython
from tests.megatron.gpt2.train.training_runs import SMALL, finish, start, steps, write_text

OLD = TEST_DATA / "megatron-2019"
genuine = pytest.mark.skipif(not OLD.is_dir(), reason=f"{OLD} is not there: no genuine checkpoints")
main = tool("checkpoint").main


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with a text, and with the checkpoint of a run of two steps in `save`."""
    folder = tmp_path_factory.mktemp("runs")
    write_text(folder)
    trainer = start(0, 1, folder, "--precision bf16")
    steps(trainer, 2)
    assert trainer.checkpoints.save() is not None
    finish(trainer)
    return folder


def read(path: Path, *, heads: int | None = None, vocab: int | None = None):
    return open_checkpoint(path, Hints(heads, vocab), log=lambda line: None)


def test_inspect(runs: Path, capsys: pytest.CaptureFixture):
    save = str(runs / "save")
    assert main(["inspect", save]) == 0
    text = capsys.readouterr().out
    assert "num layers" in text and "mp_rank_00/model.safetensors" in text
    assert main(["inspect", save, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["model"]["hidden_size"] == 128 and found["iteration"] == 2
    for file, info in found["files"].items():
        path = runs / "save" / "iter_0000002" / file
        assert path.stat().st_size == info["bytes"] and len(info["sha256"]) == 64 and info["slices"]
    assert found["tensors"]["master.word_embeddings.weight"] == {
        "dtype": "float32",
        "shape": [257, 128],
        "bytes": 4 * 257 * 128,
    }


def test_verify_finds_a_bit(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    save = tmp_path / "save"
    shutil.copytree(runs / "save", save)
    assert main(["verify", str(save)]) == 0
    file = save / "iter_0000002/mp_rank_00/exp_avg_dp_00.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    capsys.readouterr()
    assert main(["verify", str(save)]) == 1
    assert f"DAMAGED: {file}" in capsys.readouterr().out
    with pytest.raises(ValueError, match=f"{file.name}: damaged"):
        main(["merge", str(save), str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_split_merge_diff(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    save, split, merged = (str(path) for path in (runs / "save", tmp_path / "split", tmp_path / "merged"))
    assert main(["split", save, split, "--target-tensor-parallel-size", "4"]) == 0
    assert len(list(Path(split).glob("iter_*/mp_rank_*"))) == 4
    assert main(["merge", split, merged]) == 0
    capsys.readouterr()
    assert main(["diff", save, merged]) == 0
    text = capsys.readouterr().out
    assert text.endswith("equal\n") and len(re.findall(r"^exp_avg_sq\..* 0$", text, re.MULTILINE)) == 28
    other = tmp_path / "other"
    # The start of the run also copies the tokenizer.
    trainer = start(0, 1, runs, f"--load {merged} --save {other}")
    assert trainer.progress.iteration == 2
    steps(trainer, 1)
    trainer.checkpoints.save()
    finish(trainer)
    assert main(["diff", save, str(other)]) == 1
    assert capsys.readouterr().out.endswith("NOT EQUAL\n")


@pytest.mark.parametrize(
    "words",
    [
        "native",
        *(f"huggingface --dtype {dtype}" for dtype in ("fp32", "fp16", "bf16")),
        "megatron-2019",
        "megatron-core",
    ],
)
def test_convert_and_check(runs: Path, tmp_path: Path, words: str, capsys: pytest.CaptureFixture):
    """The run is in bf16. An export in a different dtype uses the fp32 masters instead of the rounded weights."""
    convert = ["convert", str(runs / "save"), str(tmp_path / "out"), "--to", *words.split()]
    assert main([*convert, "--check"]) == 0
    said = capsys.readouterr()
    found = re.search(r"greatest logit difference on 64 tokens in fp32: (\S+)", said.out)
    assert float(found[1]) == 0 and ("left out: the optimizer's state" in said.err) == words.startswith(
        ("hug", "megatron-core")
    )
    with pytest.raises(ValueError, match="not empty"):
        main(convert)
    assert not capsys.readouterr().err


@pytest.mark.parametrize("to", ["megatron-2019", "dcp"])
def test_diff_takes_the_heads_from_the_side_that_states_them(
    runs: Path, tmp_path: Path, to: str, capsys: pytest.CaptureFixture
):
    save, out = str(runs / "save"), str(tmp_path / "out")
    assert main(["convert", save, out, "--to", to]) == 0
    for pair in ((save, out), (out, save)):
        capsys.readouterr()
        assert main(["diff", *pair]) == 0
        said = capsys.readouterr()
        assert re.search(r"^exp_avg\.\S+query_key_value.weight .* 0$", said.out, re.MULTILINE) and not said.err
    with pytest.raises(ValueError, match="--num-attention-heads, one of"):
        main(["diff", out, out])


def test_check_sees_a_wrong_translation(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from megatron.gpt2.formats import megatron

    monkeypatch.setattr(megatron, "from_head_major", lambda x, heads: x)
    assert main(["convert", str(runs / "save"), str(tmp_path / "out"), "--to", "megatron-2019", "--check"]) == 1


@pytest.mark.parametrize("form", ["megatron-2019", "torch_dist"])
def test_a_run_goes_on_through_other_files(runs: Path, tmp_path: Path, form: str, capsys: pytest.CaptureFixture):
    """The conversion keeps weights, masters, moments and steps. Training refuses Megatron's files with an error that
    contains the command to convert them back. After this command, the same batches give the same losses."""
    old = str(tmp_path / "old one")
    assert main(["convert", str(runs / "save"), old, "--to", form, "--model-parallel-size", "2"]) == 0
    with pytest.raises(ValueError) as assert_refused:
        build_context(parse([*SMALL, "--load", old]), RankInfo(0, 1, 0, 1), lambda line: None)
    with pytest.raises(ValueError, match=f"is the folder of an iteration: give --load {runs / 'save'}, "):
        build_context(parse([*SMALL, "--load", f"{runs}/save/iter_0000002"]), RankInfo(0, 1, 0, 1), lambda line: None)
    command = re.search(
        r": convert it first: bash \S+ \S*tools/checkpoint.py (.*); then --load (.*) \(", str(assert_refused.value)
    )
    assert main([*shlex.split(command[1]), "--vocab-size", "257", "--tokenizer-type", "bytes"]) == 0
    assert "random states" in capsys.readouterr().err
    converted = read(Path(shlex.split(command[2])[0])).metadata
    assert ("train_iters" in converted) == (form == "torch_dist"), "no default: Megatron's files of 2019 do not hold it"
    losses: list[list[float]] = []
    batches: list[tuple[torch.Tensor, torch.Tensor]] = []
    for load in (str(runs / "save"), shlex.split(command[2])[0]):
        trainer = start(0, 1, runs, ["--load", load, "--save", f"{load}_on", "--precision", "bf16"])
        assert trainer.progress.iteration == 2 and trainer.context.tokenizer.kind == "bytes"
        batches = batches or [next(trainer.data.loader) for _ in range(3)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(trainer.data, "loader", iter(batches))
            losses.append(steps(trainer, 3)["loss"])
        finish(trainer)
    assert losses[0] == losses[1] and losses[0][0] != losses[0][2]


@pytest.mark.parametrize(
    "line, message",
    {
        "inspect {empty}": "holds no checkpoint",
        "verify {empty}/none": "does not exist",
        "convert {save} {out} --to huggingface --dtype q8_0": "--dtype q8_0: huggingface has fp32, bf16, fp16",
        "convert {save} {out} --to gguf --check": "--check: this program writes gguf",
        "split {save} {out} --model-parallel-size 3": "--num-attention-heads 4 is not divisible",
        "split {save} {out} --model-parallel-size 0": "--tensor-model-parallel-size must be positive",
        "merge {save} {out} --iteration 7": "7",
        "merge {save} {save}": "not empty",
        "merge {save} {out} --vocab-file none.json": "none.json",
    }.items(),
)
def test_bad_input(runs: Path, tmp_path: Path, line: str, message: str):
    (tmp_path / "empty").mkdir()
    words = line.format(save=runs / "save", empty=tmp_path / "empty", out=tmp_path / "out").split()
    assert message in error_line(lambda: main(words))
    assert not (tmp_path / "out").exists()


def run(python: WarmPython, program: str, *words: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [python.python, str(ROOT / "tools" / program), *words], capture_output=True, text=True, timeout=240
    )


@genuine
def test_merge_mp_partitions(python: WarmPython, tmp_path: Path):
    line = (
        "--model_type GPT2 --tensor-model-parallel-size 2 --tokenizer-type GPT2BPETokenizer --num-layers 3 "
        "--hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --load"
    )
    words = [*line.split(), str(OLD / "tp2" / "checkpoint")]
    merged = run(python, "merge_mp_partitions.py", *words, "--save", str(tmp_path / "merged"))
    assert merged.returncode == 0, merged.stderr
    a, b = read(tmp_path / "merged", heads=4), read(OLD / "tp2" / "checkpoint", heads=4)
    assert set(a.tensors) == set(b.tensors) and len(a.tensors) == 160
    assert all(torch.equal(a.read(name), b.read(name)) for name in a.tensors)
    for flag, value in (("--num-layers", "24"), ("--tensor-model-parallel-size", "4"), ("--model_type", "BERT")):
        with pytest.raises(ValueError, match=flag.replace("_", "-")):
            tool("merge_mp_partitions").main([*words, flag, value])
