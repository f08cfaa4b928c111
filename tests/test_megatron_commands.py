"""Test that command lines of Megatron's and DeepSpeed's scripts run on the CPU, with only a few flags appended.

`tests/megatron_commands.sh` and `tests/public_lines.txt` contain the command lines. Most of them run in this process,
through the program that they name. Two of them start a launcher with 2 ranks.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.gpt2.config import Config
from megatron.gpt2.config.arguments import parse
from tests.conftest import error_line
from tests.data_utils.data_files import write_byte_vocabulary, write_pair
from tests.fork_server import WarmPython
from tests.megatron.gpt2.dist.started_ranks import free_port
from tests.megatron.gpt2.train.training_runs import write_text

ROOT = Path(__file__).resolve().parent.parent
LINES = (ROOT / "tests" / "megatron_commands.sh").read_text()
PASTED = dict(re.findall(r"^## (\S+)\n(.*?\n)(?=\n## |\Z)", LINES, re.MULTILINE | re.DOTALL))
# {name of a command line: (words that its error must contain, its DeepSpeed file, its flags)}
PUBLIC = {
    name: (asks.split(), file, shlex.split(line))
    for name, asks, file, line in re.findall(
        r"^## (\S+)\n(?:# asks: (.*)\n)?(?:# ds_config.json: (.*)\n)?(.*)$",
        (ROOT / "tests" / "public_lines.txt").read_text(),
        re.MULTILINE,
    )
}

SMALL = (
    "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16 "
    "--train-iters 40 --log-interval 10 --eval-iters 1 --lr 1e-2 --device cpu "
)
GLOO = "--distributed-backend gloo "
ONE_RANK = (
    "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --micro-batch-size 8 --global-batch-size 64 "
    "--data-path data/webtext/webtext_text_document --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt "
)
Run = Callable[..., tuple[str, str]]

# The DeepSpeed files of the command lines, {name: content}, without the settings of logging.
DEEPSPEED_FILES: dict[str, dict[str, Any]] = json.loads("""{
"ds_config.json":
    {"train_batch_size": 256, "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0, "fp16": {"enabled": true,
    "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1}},
"ds_zero_stage_2_config.json":
    {"train_batch_size": 2048, "gradient_accumulation_steps": 1, "optimizer": {"type": "Adam", "params": {"lr":
    0.00015, "max_grad_norm": 1.0, "betas": [0.9, 0.95]}}, "gradient_clipping": 1.0, "zero_optimization": {"stage": 2,
    "allgather_partitions": true, "reduce_scatter": true, "allgather_bucket_size": 50000000, "reduce_bucket_size":
    50000000, "overlap_comm": true}, "fp16": {"enabled": true, "loss_scale": 0, "loss_scale_window": 1000,
    "hysteresis": 2, "min_loss_scale": 1}},
"ds_zero_stage_2_config_baseline.json":
    {"train_batch_size": 512, "gradient_accumulation_steps": 1, "optimizer": {"type": "Adam", "params": {"lr":
    0.00015, "max_grad_norm": 1.0, "betas": [0.9, 0.95]}}, "gradient_clipping": 1.0, "zero_optimization": {"stage": 2,
    "allgather_partitions": true, "reduce_scatter": true, "allgather_bucket_size": 50000000, "reduce_bucket_size":
    50000000, "overlap_comm": true}, "fp16": {"enabled": true, "loss_scale": 0, "loss_scale_window": 1000,
    "hysteresis": 2, "min_loss_scale": 1}},
"ds_zero_stage_3_config.json":
    {"train_batch_size": 64, "zero_optimization": {"stage": 3, "stage3_max_live_parameters": 1000000000.0,
    "reduce_bucket_size": 10000000.0}, "fp16": {"enabled": true, "loss_scale": 0, "loss_scale_window": 1000,
    "hysteresis": 2, "min_loss_scale": 1}},
"ds_zero2_config.json":
    {"train_batch_size": 16, "gradient_accumulation_steps": 1, "steps_per_print": 1, "zero_optimization": {"stage":
    2}, "zero_allow_untested_optimizer": true, "gradient_clipping": 1.0, "fp16": {"enabled": true, "loss_scale": 0,
    "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1}, "activation_checkpointing":
    {"partition_activations": true, "contiguous_memory_optimization": false}, "wall_clock_breakdown": false},
"ds_zero-offload_config.json":
    {"zero_optimization": {"stage": 2, "cpu_offload": true, "reduce_bucket_size": 50000000}, "fp16": {"enabled": true,
    "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1}, "activation_checkpointing":
    {"partition_activations": true, "contiguous_memory_optimization": true, "cpu_checkpointing": true},
    "train_micro_batch_size_per_gpu": 12, "gradient_accumulation_steps": 5},
"ds_zero-offload_10B_config.json":
    {"zero_optimization": {"stage": 2, "cpu_offload": true, "reduce_bucket_size": 50000000}, "fp16": {"enabled": true,
    "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1}, "activation_checkpointing":
    {"partition_activations": true, "contiguous_memory_optimization": true, "cpu_checkpointing": true},
    "train_micro_batch_size_per_gpu": 10},
"ds_early_2020.json":
    {"train_batch_size": 16, "gradient_accumulation_steps": 1, "zero_optimization": true, "optimizer": {"type":
    "Adam", "params": {"lr": 0.00015, "max_grad_norm": 1.0}}, "fp16": {"enabled": true, "loss_scale": 0,
    "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1}}
}""")


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the working folder that the scripts expect: the programs, the corpora, and a GPT-2 vocabulary of bytes."""
    folder = tmp_path_factory.mktemp("pasted")
    for name in ("megatron", "tools", "pretrain_gpt2.py"):
        (folder / name).symlink_to(ROOT / name)
    text = write_text(folder, 3000).read_text()
    for corpus in ("wikipedia/wikidump_lines.json", "webtext/data.json"):
        (folder / "data" / corpus).parent.mkdir(parents=True)
        lines = (json.dumps({"text": text[start : start + 200]}) for start in range(0, len(text), 200))
        (folder / "data" / corpus).write_text("\n".join(lines) + "\n")
    for cache in (folder / "cache", folder / "users_cache" / "gpt2-model-parallel"):
        cache.mkdir(parents=True)
        write_byte_vocabulary(cache / "gpt2-vocab.json", cache / "gpt2-merges.txt")
    for place in (folder, folder / "data"):
        shutil.copytree(folder / "cache", place, dirs_exist_ok=True)
    document = [*b"What an old script asks for is done, or refused. ", 256]
    write_pair(folder / "data" / "webtext" / "webtext_text_document", [document] * 60)
    return folder


@pytest.fixture(autouse=True)
def here(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change to the folder `work`, and remove the environment variables of launchers."""
    monkeypatch.chdir(work)
    monkeypatch.setenv("XDG_CACHE_HOME", str(work / "users_cache"))
    monkeypatch.syspath_prepend(ROOT / "tools")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MEGATRON_CORPORA"):
        monkeypatch.delenv(name, raising=False)


def words(script: str, appended: str, *parameters: str) -> list[str]:
    """Return the program's file and its flags, after bash has expanded the command line of `script`."""
    stubs = "".join(f'{name}() {{ printf "%s\\n" "$@"; }}\n' for name in ("python", "torchrun", "deepspeed"))
    line = stubs + pasted(script, appended)
    done = subprocess.run(["bash", "-c", line, "script", *parameters], capture_output=True, text=True, check=True)
    made = done.stdout.splitlines()
    return made[next(number for number, word in enumerate(made) if word.endswith(".py")) :]


def pasted(script: str, appended: str) -> str:
    return f"{PASTED[script].rstrip()} {appended}\n"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs a program in this process and returns its stdout and stderr."""

    def run(argv: list[str], code: int = 0) -> tuple[str, str]:
        monkeypatch.setattr(sys, "argv", argv)
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(ROOT / argv[0]), run_name="__main__")
        assert int(ended.value.code or 0) == code
        return capfd.readouterr()

    return run


def launched(python: WarmPython, work: Path, script: str, appended: str) -> str:
    """Run the command line of `script` on two ranks, and return its output."""
    line = pasted(script, appended).replace("GPUS_PER_NODE=8", "GPUS_PER_NODE=2").replace("=6000", f"={free_port()}")
    environment = {**os.environ, "PATH": python.path, "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    words = ["bash", "-c", f"exec 2>&1\n{line}"]
    done = subprocess.run(words, cwd=work, env=environment, capture_output=True, timeout=240)
    assert done.returncode == 0, done.stdout.decode()
    return done.stdout.decode()


def learned(folder: Path, below: float = 4.0) -> None:
    """Check that the run finished, and that its loss fell below 5.55, the loss of a uniform guess among 257 tokens."""
    assert (folder / "latest_checkpointed_iteration.txt").read_text().strip() == "40"
    losses = [
        record["lm_loss"]
        for record in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        if "split" not in record
    ]
    assert losses[-1] < below


def test_2019_on_one_device_and_what_follows_it_then_and_in_v1_and_v2(work: Path, run: Run):
    said, _ = run(words("pretrain_gpt2.sh", SMALL + GLOO))
    learned(work / "checkpoints/gpt2_345m")
    assert "--resume-dataloader: " in said and "--lazy-loader" in said and "--batch-size is read as" in said
    assert "the text is the field 'text'" not in said  # The name of a corpus decides the field, so no line tells it.

    flags = "--out-seq-length 6 --num-samples 2 --device cpu"
    _, warned = run(words("generate_text.sh", flags))
    written = [json.loads(line) for line in (work / "dbg_unconditional.json").read_text().splitlines()]
    assert len(written) == 2 and all(0 < entry["length"] <= 6 for entry in written)
    assert "full sampling" in warned  # top-k 0 with top-p 0 draws from all tokens

    run(words("v1_generate_text.sh", flags))
    assert len((work / "unconditional_samples.json").read_text().splitlines()) == 2
    (work / "lambada_test.jsonl").write_text('{"text": "the last word is the target"}\n' * 3)
    shape = "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16 "
    on_this_machine = shape + "--device cpu --precision fp32"
    evaluation = words("v2_evaluate_zeroshot_gpt.sh", on_this_machine, "lambada_test.jsonl")
    assert evaluation[0] == "./tasks/main.py"
    said, _ = run(evaluation)
    assert re.search(r"^ *task +LAMBADA ", said, re.MULTILINE) and re.search(r"^ *examples +3$", said, re.MULTILINE)
    (refused,) = run([*evaluation, "--task", "RACE"], code=2)[1].splitlines()
    assert refused.startswith("error: --task: invalid choice: 'RACE' (choose from ")


def test_2019_on_two_data_parallel_ranks(python: WarmPython, work: Path):
    flags = SMALL + GLOO + "--save checkpoints/dp --load checkpoints/dp"
    said = launched(python, work, "pretrain_gpt2_distributed.sh", flags)
    assert "2 ranks: tensor-parallel 1 × data-parallel 2" in said
    learned(work / "checkpoints/dp")


def test_2019_model_parallel_with_deepspeed(python: WarmPython, work: Path):
    (work / "ds_config.json").write_text(
        """{"train_micro_batch_size_per_gpu": 8, "train_batch_size": 16, "zero_optimization": {"stage": 1},
        "fp16": {"enabled": true, "initial_scale_power": 14}, "steps_per_print": 5}"""
    )
    said = launched(python, work, "pretrain_gpt2_model_parallel.sh", SMALL + GLOO + "--deepspeed_config ds_config.json")
    assert "2 ranks: tensor-parallel 2 × data-parallel 1" in said
    assert "8 samples × 1 data-parallel rank × 2 accumulated = 16 a step" in said
    assert "ignored: the keys of --deepspeed-config are translated instead" in said and "steps_per_print 5" in said
    learned(work / "checkpoints/gpt2_345m_mp2")


def test_deepspeed_examples_lines_are_read(work: Path, run: Run):
    for name, content in DEEPSPEED_FILES.items():
        (work / name).write_text(json.dumps(content))
    (refused,) = run(words("ZeRO3_ds_pretrain_gpt2-zero3.sh", SMALL + GLOO), code=2)[1].splitlines()
    assert re.match(r"error: --zero-stage 3 .*; --deepspeed_config .*: zero_optimization.stage 3 ", refused)
    small = SMALL + GLOO + "--model-parallel-size 1 --batch-size 8 --global-batch-size 8 --lr-decay-iters 40 "
    data = "--data-path data/webtext/webtext_text_document --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt "
    said, _ = run(words("ZeRO3_ds_pretrain_gpt2-zero2.sh", small + data + "--save ds_z --load ds_z"))
    assert "unknown keys" not in said and "--zero-contigious-gradients, --zero-reduce-scatter" in said
    assert "--checkpoint-in-cpu: ignored: it needs a GPU" in said
    learned(work / "ds_z")

    def config(script: str, appended: str) -> Config:
        return parse(words(f"{script}.sh", appended)[1:]).config

    for script in (
        "3D_parallelism_ds_pretrain_gpt2",
        "ZeRO3_ds_pretrain_gpt2",
        "ds_zero-offload_pretrain_gpt2_model_parallel",
        "ds_zero-offload_10B_pretrain_gpt2_model_parallel",
        "ds_zero2_pretrain_gpt2_model_parallel",
    ):
        parallel = config(script, small).parallel
        assert parallel.shard_gradients
        assert parallel.cpu_offload_optimizer == parallel.checkpoint_in_cpu == ("offload" in script)
    curriculum = config("ZeRO3_curriculum_ds_pretrain_gpt2", SMALL)
    assert curriculum.optimizer.lr_decay_samples == 157286400000 // 16
    # This command line is for 16 ranks: tensor-parallel size 2, pipeline size 2, data-parallel size 4.
    pipeline = config("3D_parallelism_ds_pretrain_gpt2_pipe", "")
    assert pipeline.data_parallel_size(16) == 4 and pipeline.build_batch_schedule(16).final == 256 == 4 * 4 * 16
    assert [len(layers) for layers in pipeline.layers_of_virtual_stages()] == [12, 12]
    # Two scripts of early 2020 have a DeepSpeed file of the same name.
    (work / "ds_config.json").write_text(json.dumps(DEEPSPEED_FILES["ds_early_2020.json"]))
    assert config("ds_pretrain_gpt2_model_parallel", "--model-parallel-size 4").train.global_batch_size == 16
    assert config("ds_pretrain_gpt2", SMALL + GLOO).parallel.use_distributed_optimizer


def test_todays_gpt_example(work: Path, run: Run):
    parameters = ("ckpt", "logs", "gpt2-vocab.json", "gpt2-merges.txt", "data/webtext/webtext_text_document")

    def train(flags: str, code: int = 0) -> tuple[str, str]:
        argv = words("train_gpt3_175b_distributed.sh", flags, *parameters)
        assert argv[0] == "pretrain_gpt.py"
        return run(argv, code)

    assert "--num-attention-heads 2 is not divisible by --tensor-model-parallel-size 8" in train(SMALL, code=2)[1]
    small = SMALL + "--tensor-model-parallel-size 1 "
    assert "--pipeline-model-parallel-size 16 needs at least 16 layers" in train(small, code=2)[1]
    # The warm-up of Megatron's command, 430 x 1536 samples, would be longer than the test.
    small += "--pipeline-model-parallel-size 1 --micro-batch-size 16 --lr-warmup-fraction 0 "
    said, _ = train(small)
    learned(work / "ckpt", below=5.45)  # Megatron's command makes small initial weights, so the loss falls slowly.
    assert list((work / "logs").glob("events*"))
    assert "1536 a step, 24,576 tokens; it grows from 16 to this size over 750,000,000 samples" in said


def public(name: str, appended: str = "") -> list[str]:
    """Return the words of a line of public_lines.txt, a small shape and `appended`. Write the DeepSpeed file of the
    line."""
    _, file, line = PUBLIC[name]
    Path("ds_config.json").write_text(file)
    return ["pretrain_gpt.py", *line, *(SMALL + GLOO + ONE_RANK + appended).split()]


def test_public_lines_are_accepted_or_name_all_that_they_ask_for():
    assert len(PUBLIC) == 61
    for name, (asks, _, _) in PUBLIC.items():
        if asks:
            said = error_line(lambda: parse(public(name)[1:]))  # noqa: B023
            assert "unknown" not in said and [word for word in asks if word not in said] == [], name
        else:
            assert parse(public(name)[1:]).config.model.hidden_size == 32, name
    assert sum(not asks for asks, _, _ in PUBLIC.values()) == 41


@pytest.mark.parametrize(
    "name, said",
    {
        "core-0.19.0/gpt3_mcore_te_tp1_pp4_vp1": "per-virtual-pipeline-stage: ignored: there is one pipeline stage",
        "bs/train_tr1-13B-base_tr1-13B-round1.slurm": "--codecarbon-dir",
    }.items(),
)
def test_public_lines_train(work: Path, run: Run, name: str, said: str):
    """Two command lines of Megatron and BigScience train for three steps."""
    folder = name.partition("/")[0]
    more = f"--train-iters 3 --ffn-hidden-size 128 --save {folder} --load {folder} --tensorboard-dir tb"
    assert said in run(public(name, more))[0] and (work / folder / "iter_0000003").is_dir()
