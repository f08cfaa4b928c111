"""Command lines of Megatron's and DeepSpeed's scripts run on the CPU, changed by flags at their end alone.

`tests/pasted/` has the lines. In one process they run through the file that they name; the two that start a launcher
run as they are, on 2 ranks, since GPUS_PER_NODE is this machine's to say.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from data_utils.indexed_dataset import IndexedDatasetBuilder, token_dtype
from data_utils.tokenization_gpt2 import END_OF_TEXT, byte_alphabet
from tests.megatron.gpt2.training.training_runs import write_text

ROOT = Path(__file__).resolve().parent.parent
PASTED = ROOT / "tests" / "pasted"

SMALL = ("--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16 "
         "--train-iters 40 --log-interval 10 --eval-iters 1 --lr 1e-2 --device cpu ")
GLOO = "--distributed-backend gloo "


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the scripts expect to stand in: the programs, the corpora, GPT-2's vocabulary (of bytes)."""
    folder = tmp_path_factory.mktemp("pasted")
    for name in ("megatron", "tools", "pretrain_gpt2.py"):
        (folder / name).symlink_to(ROOT / name)
    text = write_text(folder, 3000).read_text()
    for corpus in ("wikipedia/wikidump_lines.json", "webtext/data.json"):
        (folder / "data" / corpus).parent.mkdir(parents=True)
        lines = (json.dumps({"text": text[start:start + 200]}) for start in range(0, len(text), 200))
        (folder / "data" / corpus).write_text("\n".join(lines) + "\n")
    for cache in (folder / "cache", folder / "users_cache" / "gpt2-model-parallel"):
        cache.mkdir(parents=True)
        vocabulary = {token: number for number, token in enumerate([*byte_alphabet(), END_OF_TEXT])}
        (cache / "gpt2-vocab.json").write_text(json.dumps(vocabulary))
        (cache / "gpt2-merges.txt").write_text("#version: 0.2\n")
    return folder


@pytest.fixture(autouse=True)
def here(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(work)
    monkeypatch.setenv("XDG_CACHE_HOME", str(work / "users_cache"))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MEGATRON_CORPORA"):
        monkeypatch.delenv(name, raising=False)


def words(script: str, appended: str, *parameters: str) -> list[str]:
    """What the shell makes of the script's command: the program's file and its flags."""
    stubs = "".join(f'{name}() {{ printf "%s\\n" "$@"; }}\n' for name in ("python", "torchrun", "deepspeed"))
    line = stubs + pasted(script, appended)
    done = subprocess.run(["bash", "-c", line, "script", *parameters], capture_output=True, text=True, check=True)
    made = done.stdout.splitlines()
    return made[next(number for number, word in enumerate(made) if word.endswith(".py")):]


def pasted(script: str, appended: str) -> str:
    return f"{(PASTED / script).read_text().rstrip()} {appended}\n"


def run(argv: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """The file that the line names, of the project's folder, in this process; its exit code."""
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / argv[0]), run_name="__main__")
    return int(ended.value.code or 0)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def launched(work: Path, script: str, appended: str) -> subprocess.CompletedProcess[str]:
    line = pasted(script, appended).replace("GPUS_PER_NODE=8", "GPUS_PER_NODE=2").replace("=6000", f"={free_port()}")
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    return subprocess.run(["bash", "-c", line], cwd=work, env=environment, text=True, timeout=100,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def learned(folder: Path, below: float = 4.0) -> None:
    """The run was finished, and its loss fell from that of the uniform guess among 257, which is 5.55."""
    assert (folder / "latest_checkpointed_iteration.txt").read_text().strip() == "40"
    losses = [record["lm_loss"] for record in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
              if "split" not in record]
    assert losses[-1] < below


def test_2019_on_one_device_and_its_generation(work: Path, monkeypatch: pytest.MonkeyPatch,
                                               capfd: pytest.CaptureFixture[str]):
    assert run(words("pretrain_gpt2.sh", SMALL + GLOO), monkeypatch) == 0
    said = capfd.readouterr().out
    learned(work / "checkpoints/gpt2_345m")
    assert "--resume-dataloader: " in said and "--lazy-loader: " in said and "--batch-size is read as" in said
    assert "the text is the field 'text'" not in said  # it is the corpus that says so

    flags = "--out-seq-length 6 --num-samples 2 --device cpu"
    assert run(words("generate_text.sh", flags), monkeypatch) == 0
    written = [json.loads(line) for line in (work / "dbg_unconditional.json").read_text().splitlines()]
    assert len(written) == 2 and all(0 < entry["length"] <= 6 for entry in written)
    assert "full sampling" in capfd.readouterr().err  # which the script takes for greedy


def test_without_a_gpu_nccl_is_an_error_that_names_gloo(monkeypatch: pytest.MonkeyPatch,
                                                        capfd: pytest.CaptureFixture[str]):
    assert run(words("pretrain_gpt2.sh", SMALL), monkeypatch) == 2
    assert "--distributed-backend gloo" in capfd.readouterr().err


def test_2019_on_two_data_parallel_ranks(work: Path):
    done = launched(work, "pretrain_gpt2_distributed.sh", SMALL + GLOO + "--save checkpoints/dp --load checkpoints/dp")
    assert done.returncode == 0, done.stdout
    assert re.search(r"2 ranks: model-parallel 1 × data-parallel 2", done.stdout)
    learned(work / "checkpoints/dp")


def test_2019_model_parallel_with_deepspeed(work: Path):
    (work / "ds_config.json").write_text(json.dumps({
        "train_micro_batch_size_per_gpu": 8, "train_batch_size": 16, "zero_optimization": {"stage": 1},
        "fp16": {"enabled": True, "initial_scale_power": 14}, "steps_per_print": 5}))
    done = launched(work, "pretrain_gpt2_model_parallel.sh", SMALL + GLOO + "--deepspeed_config ds_config.json")
    assert done.returncode == 0, done.stdout
    assert re.search(r"2 ranks: model-parallel 2 × data-parallel 1", done.stdout)
    assert "8 samples × 1 data-parallel ranks × 2 accumulated = 16 a step" in done.stdout
    assert "without effect here: there is one engine" in done.stdout and "steps_per_print 5" in done.stdout
    learned(work / "checkpoints/gpt2_345m_mp2")


def test_deepspeeds_own_line_once_its_stage_is_1(work: Path, monkeypatch: pytest.MonkeyPatch,
                                                 capfd: pytest.CaptureFixture[str]):
    shutil.copy(PASTED / "ds_zero2_config.json", work)
    argv = words("ds_zero2_pretrain_gpt2_model_parallel.sh", SMALL + GLOO + "--model-parallel-size 1 --save ds "
                 "--global-batch-size 8")
    assert run(argv, monkeypatch) == 2
    refused = capfd.readouterr().err
    assert refused.startswith("error: --deepspeed_config ./ds_zero2_config.json: zero_optimization.stage: 2 is not")
    assert "1 gives the same losses" in refused
    config = json.loads((work / "ds_zero2_config.json").read_text())
    config["zero_optimization"]["stage"] = 1
    (work / "ds_zero2_config.json").write_text(json.dumps(config))
    assert run(argv, monkeypatch) == 0
    said = capfd.readouterr().out
    assert "train_batch_size 16: without effect, since --global-batch-size 8 is given" in said
    assert "--use-distributed-optimizer" in said and "--sequence-parallel" in said
    learned(work / "ds")


def test_todays_gpt_example(work: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    builder = IndexedDatasetBuilder(work / "my_text_document", token_dtype(257))
    for _ in range(60):
        builder.add(list(b"What an old script asks for is done, or refused. "))
        builder.end_document(256)
    builder.finish()
    parameters = ("ckpt", "logs", "cache/gpt2-vocab.json", "cache/gpt2-merges.txt", "my_text_document")
    argv = words("train_gpt3_175b_distributed.sh", SMALL, *parameters)
    assert argv[0] == "pretrain_gpt.py" and run(argv, monkeypatch) == 2
    assert "--step-batch-size-schedule 0:16 2.4B:320" in capfd.readouterr().err
    appended = "--step-batch-size-schedule 0:4 --global-batch-size 4 --tensor-model-parallel-size 1 "
    assert run(words("train_gpt3_175b_distributed.sh", SMALL + appended, *parameters), monkeypatch) == 2
    assert "--pipeline-model-parallel-size 16 is not supported, only 1" in capfd.readouterr().err
    appended += "--pipeline-model-parallel-size 1"
    assert run(words("train_gpt3_175b_distributed.sh", SMALL + appended, *parameters), monkeypatch) == 0
    learned(work / "ckpt", below=5.45)  # from smaller weights, in smaller batches
    assert list((work / "logs").glob("events*"))
