"""Test the command line: presets, aliases, flags of other programs, errors, batch size schedules, merging with a
checkpoint, and --config with the config.json of a run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from data_utils import BatchSchedule
from megatron.gpt2.config import (
    SECTIONS,
    OptimizerConfig,
    TrainConfig,
    config_fields,
    flag_name,
    ignored_flags,
    non_default_values,
    read_config,
    write_config,
)
from megatron.gpt2.config.arguments import Arguments, merge_checkpoint, parse
from megatron.gpt2.config.presets import PRESETS, SHAPES
from tests.conftest import error_line

QUICKSTART_ITERS = PRESETS["quickstart"]["train.train_iters"]


def read(line: str) -> Arguments:
    return parse(line.split())


TRAINED = " --tokenizer-type builtin --vocab-size 2048"  # A run gets kind and vocabulary size from its tokenizer.


def saved(line: str) -> dict[str, dict[str, object]]:
    """Return the configuration that a checkpoint of a run with this command line stores, as read from its JSON."""
    return json.loads(json.dumps(read(TRAINED + " " + line).config.as_dict()))


def test_without_flags_the_quickstart_runs():
    arguments = read("")
    assert arguments.preset == "quickstart" and not arguments.given and not arguments.notes
    assert (arguments.config.model.num_layers, arguments.config.train.train_iters) == (4, QUICKSTART_ITERS)
    # In the quickstart, --min-lr is a twentieth of --lr.
    assert read("--lr 1e-4").config.optimizer.min_lr == pytest.approx(5e-6)
    assert arguments.config.checkpoint.save == "checkpoints/gpt2_quickstart"
    assert arguments.config.optimizer.optimizer == "muon"
    for flags in ("--optimizer adam", "--cpu-offload-optimizer"):
        optimizer = read(flags).config.optimizer
        assert (optimizer.optimizer, optimizer.lr) == ("adam", 8e-4)


def test_345m_is_the_published_example():
    published = (
        "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --max-position-embeddings 1024 --seq-length 1024 "
        "--attention-dropout 0.1 --hidden-dropout 0.1 --split 949,50,1 --tokenizer-type GPT2BPETokenizer --lr 1.5e-4 "
        "--lr-decay-style cosine --warmup .01 --weight-decay .01 --clip-grad 1 --adam-beta1 .9 --adam-beta2 .999 "
        "--batch-size 8 --train-iters 320000 --seed 1234 --eval-interval 1000 --eval-iters 100 --log-interval 100 "
        "--save-interval 5000 --recompute-granularity none --save checkpoints/gpt2_345m"
    )
    assert read("--model 345M").config == read(published).config


def test_each_preset_is_a_valid_configuration():
    assert SHAPES["8.3b"] == (72, 3072, 32) and len(PRESETS) == 8
    for name in PRESETS:
        assert read(f"--model {name}").config.model.hidden_size


def test_flags_override_the_preset():
    config = read("--model 345m --lr=3e-4 --train-samples 3e2 --num-layers 2").config
    assert (config.optimizer.lr, config.train.train_iters, config.train.train_samples) == (3e-4, None, 300)
    assert (config.model.hidden_size, config.checkpoint.save) == (1024, "checkpoints/gpt2_2x1024")


def test_a_given_shape_has_the_defaults_of_2019():
    arguments = read("--num-layers 2")
    assert arguments.preset is None
    assert non_default_values(arguments.config) == {
        "model.num_layers": 2,
        "train.train_iters": 1_000_000,
        "checkpoint.save": "checkpoints/gpt2_2x1024",
    }


def test_save_defaults_to_the_folder_loaded_unless_it_is_fine_tuned():
    assert read("--load a/b/").config.checkpoint.save == "a/b/"
    assert read("--load a/b/ --finetune").config.checkpoint.save == "a/b_finetuned"
    assert read("--load a --save c").config.checkpoint.save == "c"


@pytest.mark.parametrize(
    "line, key, value",
    [
        ("--batch-size 3", "train.micro_batch_size", 3),
        ("--model-parallel-size 2", "parallel.tensor_model_parallel_size", 2),
        ("--warmup .2", "optimizer.lr_warmup_fraction", 0.2),
        ("--override-opt_param-scheduler", "optimizer.override_opt_param_scheduler", True),
        ("--use-checkpoint-lr-scheduler", "optimizer.use_checkpoint_opt_param_scheduler", True),
        ("--activations-checkpoint-method uniform", "train.recompute_granularity", "full"),
        ("--recompute-activations", "train.recompute_granularity", "selective"),
        ("--fp16", "train.precision", "fp16-on-gpu"),
        ("--bf16 --precision bf16", "train.precision", "bf16"),
        ("--train-data-path .3 a .7 b", "data.split", "1"),
        ("--train-data-path a --val-data-path .5 b .5 c", "data.valid_data_path", (".5", "b", ".5", "c")),
        ("--no-bias-gelu-fusion", "model.gelu", "erf"),
        ("--no-bias-gelu-fusion --openai-gelu", "model.gelu", "tanh"),
        ("--zero-stage 0", "parallel.use_distributed_optimizer", False),
        ("--zero-stage 1", "parallel.shard_gradients", False),
        ("--zero-stage 2", "parallel.shard_gradients", True),
        ("--pipe-parallel-size 0", "parallel.pipeline_model_parallel_size", 1),
        ("--seq-length 16 --lr-decay-tokens 1_600", "optimizer.lr_decay_samples", 100),
        ("--seq-length 16 --lr-warmup-tokens 1.6e2", "optimizer.lr_warmup_samples", 10),
        ("--padded-vocab-size 50304", "model.make_vocab_size_divisible_by", 50304),
        ("--hidden-size 64 --num-attention-heads 4 --kv-channels 16 --num-query-groups 4", "model.hidden_size", 64),
        # In Megatron today, the first profiled iteration is the one after --profile-step-start.
        ("--profile --use-pytorch-profiler", "train.profile", (11, 12)),
        ("--profile --profile-step-start 4 --profile-step-end 6 --profile-ranks 0 3", "train.profile", (5, 6)),
        ("--use-mup --mup-base-hidden-size 64 --mup-base-head-dim 64 --mup-output-mult 1", "model.mup_base_width", 64),
    ],
)
def test_spellings_of_2019_and_today(line, key, value):
    arguments = read(line)
    section, name = key.split(".")
    assert getattr(getattr(arguments.config, section), name) == value and (key in arguments.given or not value)
    assert arguments.notes or line == "--override-opt_param-scheduler"  # `_` instead of `-` needs no note.


def test_an_explicit_value_wins_over_a_translated_flag():
    assert read("--fp16 --precision fp16").notes == ("--fp16: ignored: --precision fp16 is given",)


def test_ignored_flags_are_noted_once():
    arguments = read(
        "--lazy-loader --loose-json --context-parallel-size 1 --local_rank=3 --use-mcore-models "
        "--fp32-allreduce --num_layers 2 --DDP-impl torch"
    )
    assert arguments.config.model.num_layers == 2
    assert len(arguments.notes) == 5 and all("\n" not in note for note in arguments.notes)


@pytest.mark.parametrize(
    "line, message",
    {
        "--hiden-size=3": "unknown flag --hiden-size: did you mean --hidden-size?",
        "--ddp-impl local": "unknown flag --ddp-impl: did you mean --DDP-impl?",
        "stray": "unexpected argument 'stray'",
        "--num-layers two": "--num-layers: invalid int value: 'two'",
        "--train-iters 1.5": "--train-iters: '1.5' is not a whole number",
        "--num-layers": "--num-layers: expected one argument",
        "--model 3b": "--model: invalid choice: '3b'",
        "--fp16 --bf16": "--bf16 contradicts --fp16",
        "--fp16 --precision fp16 --bf16": "--bf16 contradicts --precision fp16",
        "--context-parallel-size 2": "--context-parallel-size 2 is not supported, only 1",
        "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 24": "layers for the other 1 stages",
        "--num-layers-per-virtual-pipeline-stage 2 --num-virtual-stages-per-pipeline-rank 2 "
        "--pipeline-model-parallel-size 2": "give --num-layers-per-",
        "--pipeline-model-parallel-size 2 --pipeline-schedule zero-bubble --compile": "zero-bubble and --compile",
        "--pipeline-schedule interleaved": "--pipeline-schedule interleaved needs two or more virtual stages per rank",
        "--recompute-granularity core": "--recompute-granularity: invalid choice: 'core'",
        "--sequence-parallel --model-parallel-size 4 --num-attention-heads 8 --seq-length 30": "splits --seq-length 30",
        "--train-data-path .": "--train-data-path . is a directory",
        "--train-data-path a --split 90,10": "--train-data-path a contradicts --split 90,10",
        "--valid-data a --valid-data-path b": "give --valid-data-path or --valid-data, not both",
        "--warmup .1 --lr-warmup-iters 3": "give --lr-warmup-fraction or --lr-warmup-iters, not both",
        "--lr-decay-samples 40 --lr-decay-iters 3": "give --lr-decay-iters or --lr-decay-samples, not both",
        "--vocab-file a --tokenizer-model b": "choose one with --tokenizer-type",
        "--context-parallel-size": "--context-parallel-size: expected a value",
        "--use-mcore-models stray": "unexpected argument 'stray': a value must follow a flag",
        "--num-attention-heads 3": "--hidden-size 1024 is not divisible by --num-attention-heads 3",
        "--finetune": "--finetune needs --load",
        "--local-checkpoint-interval 2": "--local-checkpoint-dir and --local-checkpoint-interval ",
        "--cpu-offloading-num-layers 2 --recompute-granularity full": "--checkpoint-in-cpu",
        "--shard-gradients": "--shard-gradients needs --use-distributed-optimizer",
        "--zero-stage 2 --pipeline-model-parallel-size 2": "leave it out (--zero-stage 1)",
        "--cpu-offloading-num-layers 9": "--cpu-offloading-num-layers 9 is more than --num-layers 4",
        "--optimizer muon --cpu-offload-optimizer": "--optimizer muon and --cpu-offload-optimizer: only AdamW runs",
        "--profile 5": "--profile takes the first iteration and the last",
        "--profile --profile-step-start 20": "--profile takes the first iteration and the last",
        "--profile --profile-step-start x": "--profile-step-start x",
        "--rampup-batch-size 4 2": "it takes START, INCREMENT and SAMPLES",
        "--rampup-batch-size 4 3 9 --global-batch-size 8": "steps of 3 samples do not lead from 4 to --",
        "--micro-batch-size 2 --rampup-batch-size 4 2 9 --global-batch-size 8": "6 is not divisible by --micro-batch-"
        "size 2 × 2 data-parallel ranks: give a --micro-batch-size that fits, or another batch size",
        "--step-batch-size-schedule 0:x": "--step-batch-size-schedule 0:x: 0:x is not a valid next TOKENS:SIZE",
        # 31 tokens are less than a sample, so both sizes would begin at sample 0.
        "--seq-length 32 --step-batch-size-schedule 0:4,31:8": "31:8 is not a valid next TOKENS:SIZE",
        "--step-batch-size-schedule 1B:4": "1B:4: the first TOKENS must be 0, and sizes must not fall",
        "--step-batch-size-schedule 0:8 1B:4": "0:8 1B:4: the first TOKENS must be 0, and sizes must not fall",
        "--step-batch-size-schedule 0:4 1B:8 --global-batch-size 4": "4 is not the last size of --step-",
        "--step-batch-size-schedule 0:4 --rampup-batch-size 4 4 9": "give --rampup-batch-size or --step-",
    }.items(),
)
def test_errors_are_one_line_that_names_the_flag(line, message):
    assert message in error_line(lambda: read(line).config.build_batch_schedule(2))


@pytest.mark.parametrize(
    "rule, lines",
    {
        "must be positive": "--global-batch-size 0|--exit-interval 0|--adam-eps 0|--lr 0|--ffn-hidden-size -4",
        "must be at least 0": "--weight-decay -.1|--cpu-offloading-num-layers -1|--num-workers -1|--min-lr -1",
        "must be in [0, 1)": "--adam-beta1 1|--adam-beta2 -.1|--hidden-dropout 1",
        "must be in [0, 2**31)": "--seed -1|--seed 2147483648",
        "must be in (0, 1e6]": "--distributed-timeout-minutes 0|--distributed-timeout-minutes 1000001",
        "is not a finite number": "--lr nan|--clip-grad inf|--weight-decay inf|--loss-scale 1e999|--adam-eps=-inf",
    }.items(),
)
def test_values_out_of_range_are_one_line_that_names_the_flag(rule, lines):
    for line in lines.split("|"):
        said = error_line(lambda: read(line).config)  # noqa: B023
        assert said.startswith(line.replace("=", " ").split()[0]) and rule in said, line


def test_the_last_of_repeated_flags_wins_also_with_several_values():
    several = [name for name, f in config_fields().items() if isinstance(f.default, tuple)]
    assert several
    for name in several:
        assert [int(value) for value in read(f"{flag_name(name)} 3 4 {flag_name(name)} 5 6").values[name]] == [5, 6]
    assert read("--train-data-path p --train-data-path q").config.data.data_path == ("q",)


def test_help_groups_the_flags_and_shows_aliases(capsys):
    with pytest.raises(SystemExit) as stop:
        read("--help")
    text = capsys.readouterr().out
    # Since Python 3.13, argparse prints the metavar once, after all spellings.
    assert stop.value.code == 0 and re.search("--micro-batch-size( N)?, --batch-size N", text)
    assert all(f"\n{section}:" in text for section in SECTIONS) and "--zero-stage" in text


def test_tokenizer_files_imply_the_tokenizer():
    assert read("--vocab-file v --merge-file m").config.data.tokenizer_type == "GPT2BPETokenizer"
    assert read("--model 345m --tokenizer-path t").config.data.tokenizer_type == "SentencePieceTokenizer"
    assert read("--vocab-file v --tokenizer-type bytes").config.data.tokenizer_type == "bytes"
    assert read("").config.data.tokenizer_type is None


def test_lengths():
    sizes: dict[str, Any] = {"schedule": BatchSchedule.constant(10), "seq_length": 8, "samples_per_epoch": 95}
    for length, iterations in (
        (TrainConfig(train_tokens=801), 11),
        (TrainConfig(train_epochs=2), 19),
        (TrainConfig(train_iters=7, train_samples=50, train_tokens=801), 5),
    ):
        assert length.iterations(**sizes) == iterations
    # A run that continues has read 48 of its 80 samples in its first 12 steps.
    assert TrainConfig(train_samples=80).iterations(**sizes, iteration=12, consumed_samples=48) == 12 + 4
    with pytest.raises(ValueError, match="--train-iters"):
        TrainConfig().iterations(**sizes)


# -- merging with a checkpoint -----------------------------------------------------------------------------------

SMALL = "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --lr 1e-3 --train-iters 20 "


def test_shape_and_tokenizer_come_from_the_checkpoint():
    config = merge_checkpoint(read("--load x"), saved(SMALL + "--tokenizer-type bytes --seq-length 128")).config
    assert (config.model.num_layers, config.model.hidden_size, config.model.max_position_embeddings) == (2, 64, 512)
    assert (config.model.vocab_size, config.data.tokenizer_type, config.data.seq_length) == (2048, "bytes", 128)


def test_without_a_model_the_run_of_the_checkpoint_continues():
    line = (
        SMALL + "--batch-size 3 --train-data a b --split 8,1,1 --warmup .3 --fp16 --seed 7 --lr-decay-style WSD "
        "--min-lr 1e-4"
    )
    # A continued run does not take --device and --exit-interval from the checkpoint.
    before = saved(line + " --device cpu --exit-interval 5")
    assert merge_checkpoint(read("--load x"), before).config == read(line + " --load x" + TRAINED).config
    longer = merge_checkpoint(read("--load x --train-tokens 99 --data-path p"), before).config
    assert (longer.train.train_iters, longer.data.train_data, longer.data.data_path) == (None, (), ("p",))
    tuned = merge_checkpoint(read("--load x --finetune --lr 1e-4"), before).config
    assert (tuned.train.train_iters, tuned.optimizer.lr_decay_style) == (QUICKSTART_ITERS, "WSD")
    assert tuned.optimizer.min_lr == pytest.approx(1e-5)
    named = merge_checkpoint(read(SMALL + "--load x --lr-decay-style WSD --warmup .3"), before).config
    assert (named.train.micro_batch_size, named.data.train_data, named.train.seed) == (4, (), 1234)


def test_a_run_may_be_invalid_until_the_checkpoint_is_merged():
    arguments = read("--load x --num-attention-heads 12")  # The hidden size 1024 is not divisible by 12.
    assert arguments.checkpoint.load == "x"
    wide = saved("--hidden-size 768 --num-attention-heads 12")
    assert merge_checkpoint(arguments, wide).config.model.hidden_size == 768


@pytest.mark.parametrize(
    "line, message",
    {
        "--num-layers 3": "--num-layers: here 3, checkpoint 2: leave these",
        "--vocab-file v": "--tokenizer-type: here GPT2BPETokenizer, checkpoint builtin",
        "--ffn-hidden-size 100": "--ffn-hidden-size: here 100, checkpoint 256",
        "--mup-base-width 32": "--mup-base-width: here 32, checkpoint 0",
        "--model 345m": "--num-layers: here 24, checkpoint 2; --hidden-size: here 1024, checkpoint 64; "
        "--num-attention-heads: here 16, checkpoint 2; .*: leave these flags out",
        "--optimizer muon --no-load-optim": "--optimizer muon: the checkpoint's --lr 0.001 is for adam: give --lr and ",
        "--num-layers 3 --lr 2e-3 --warmup .5": "--num-layers: here 3, checkpoint 2: .* and --load; "
        "--lr: here 0.002, checkpoint 0.001; --lr-warmup-fraction: here 0.5, .*--override",
    }.items(),
)
def test_a_given_shape_that_differs_is_refused(line, message):
    with pytest.raises(ValueError, match=message):
        merge_checkpoint(read(line), saved(SMALL))


def test_flags_may_repeat_the_checkpoint_and_some_may_differ():
    line = SMALL + "--ffn-hidden-size 256 --seq-length 100 --seed 5 --train-iters 40"
    config = merge_checkpoint(read(line), saved(SMALL)).config
    assert (config.data.seq_length, config.train.seed, config.train.train_iters) == (100, 5, 40)
    assert config.optimizer.lr_decay_iters is None  # The learning rate decays over all 40 iterations.


def merged(line: str, before: str) -> OptimizerConfig:
    return merge_checkpoint(read(line), saved(before)).config.optimizer


ITERATIONS = SMALL + "--lr-decay-style cosine --lr-warmup-iters 5 --lr-decay-iters 30"
SAMPLES = SMALL + "--lr-warmup-samples 5 --lr-decay-samples 30"


def test_schedule_comes_from_the_checkpoint_unless_given():
    for line, before in (
        ("--train-iters 40", ITERATIONS),
        ("--lr 1e-3 --lr-decay-iters 30", ITERATIONS),
        ("--load x", SAMPLES),
        ("--lr-decay-samples 30 --lr-warmup-samples 5", SAMPLES),
    ):
        assert merged(line, before) == read(before).config.optimizer
    notes = merge_checkpoint(read("--num-layers 2"), saved(ITERATIONS)).notes
    assert notes == (
        "schedule from the checkpoint: --lr 0.001 --lr-decay-style cosine --lr-decay-iters 30 --lr-warmup-iters 5",
    )


def test_a_different_schedule_is_an_error_with_two_alternatives():
    for line, before in (
        ("--lr 2e-3", ITERATIONS),
        ("--lr-decay-style WSD", ITERATIONS),
        ("--lr-decay-iters 50", ITERATIONS),
        ("--warmup .2", ITERATIONS),
        ("--lr-decay-samples 31", SAMPLES),
        ("--lr-warmup-iters 5", SAMPLES),
    ):
        with pytest.raises(ValueError, match="--override-opt-param-scheduler .* --use-checkpoint-opt-param-scheduler"):
            merged(line, before)
        own = "--num-layers 2 " + line + " --override-lr-scheduler"
        assert merged(own, before) == read(own).config.optimizer
        takes = " --use-checkpoint-lr-scheduler"
        assert merged(line + takes, before) == read(before + takes).config.optimizer
    assert merged("--lr 2e-3 --use-checkpoint-lr-scheduler", SMALL).lr_decay_iters == 20


@pytest.mark.parametrize(
    "line, device, said",
    [
        ("--checkpoint-activations --partition-activations", "cuda", ".*there is one tensor-parallel rank"),
        ("--partition-activations --model-parallel-size 2", "cuda", ".*it needs --recompute-granularity full"),
        (
            "--checkpoint-activations --distribute-saved-activations --sequence-parallel --model-parallel-size 2",
            "cuda",
            ".*--sequence-parallel splits these inputs already",
        ),
        ("--checkpoint-activations --partition-activations --checkpoint-in-cpu --model-parallel-size 2", "cuda", ""),
        (
            "--checkpoint-activations --checkpoint-in-cpu --attention-backend flash",
            "cpu",
            "--.*it needs a GPU.*\n--.*it needs a GPU.*",
        ),
        ("--recompute-granularity selective", "cuda", ".*Megatron's: the core of attention.*"),
    ],
)
def test_flags_without_effect_are_logged(line: str, device: str, said: str):
    lines = "\n".join(ignored_flags(read(line).config, device))
    assert re.fullmatch(said, lines), lines


RAMP = "--rampup-batch-size 4 4 9 --global-batch-size 8 --micro-batch-size"


@pytest.mark.parametrize(
    "flags, stages",
    {
        "--gradient-accumulation-steps 3": ((0, 12),),
        "": ((0, 4),),
        "--rampup-batch-size 4 8 48 --global-batch-size 20": ((0, 4), (24, 12), (48, 20)),
        "--rampup-batch-size 4 4 1e2 --gradient-accumulation-steps 2": ((0, 4), (100, 8)),
        "--step-batch-size-schedule 0:4,1.6k:.8K 2M:1200 --global-batch-size 1200": ((0, 4), (50, 800), (62500, 1200)),
    }.items(),
)
def test_batch_size_schedules(flags: str, stages: tuple[tuple[int, int], ...]):
    config = read(f"--micro-batch-size 2 --seq-length 32 {flags}").config
    assert config.build_batch_schedule(2) == BatchSchedule(stages)


def test_past_batch_sizes_may_be_too_small_for_more_ranks():
    config = read(RAMP + " 2").config
    assert config.build_batch_schedule(4, consumed_samples=12).final == 8
    with pytest.raises(ValueError, match="4 is not divisible"):
        config.build_batch_schedule(4, consumed_samples=8)


def test_a_flag_replaces_the_batch_size_schedule_of_a_config_file(tmp_path: Path):
    write_config(tmp_path, read(RAMP + " 4").config, {"global_batch_size": 8}, continues=False)
    for flags, stages in (
        ("--micro-batch-size 1 --global-batch-size 12", ((0, 4), (5, 8), (9, 12))),
        ("--step-batch-size-schedule 0:16", ((0, 16),)),
        ("--rampup-batch-size", ((0, 8),)),
    ):
        schedule = read(f"--config {tmp_path}/config.json {flags}").config.build_batch_schedule(1)
        assert schedule.milestones == stages


def test_config_of_a_fine_tuned_run_keeps_the_folder_of_its_weights(tmp_path: Path):
    for flags, continues in (("--load a --finetune", False), ("--load s", True)):
        config = read(f"{flags} --save s").config
        write_config(tmp_path, config, {"global_batch_size": 4}, continues=continues)
    values = read_config(str(tmp_path / "config.json"))
    assert (values["checkpoint.load"], values["checkpoint.finetune"]) == ("a", True)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    line = "--num-layers 2 --lr 1e-3 --train-data a --load s --save s --vocab-size 9"
    write_config(tmp_path, read(line).config, {"global_batch_size": 8}, continues=False)
    return tmp_path / "config.json"


def test_only_non_default_values_are_read(config: Path):
    assert read_config(str(config)) == {
        "model.num_layers": 2,
        "optimizer.lr": 1e-3,
        "data.train_data": ("a",),
        "train.train_iters": 1_000_000,
        "train.global_batch_size": 8,
        "checkpoint.save": "s",
    }


@pytest.mark.parametrize(
    "text, replaced_by, message",
    [
        ('"version": 1', '"version": 2', "it has version 2, and this program reads version 1"),
        ('"num_layers": 2', '"depth": 3', "unknown in the configuration: model.depth"),
        ('"num_layers": 2', '"num_layers": "two"', "is not the config.json of a run"),
        ('"num_layers": 2', '"num_layers": 0', "--num-layers must be positive"),
        ('"global_batch_size": 8', '"global_batch_size": null', "is not the config.json of a run"),
        ("{", "[", ""),
        ("{", "\xff", ""),
    ],
)
def test_errors_of_a_config_file(config: Path, text: str, replaced_by: str, message: str):
    before = config.read_text()
    config.write_text(before.replace(text, replaced_by), encoding="latin-1")
    said = error_line(lambda: read(f"--config {config}"))
    assert text in before and said.startswith(f"--config {config}") and message in said


def test_a_missing_config_file_and_a_given_model(config: Path):
    assert error_line(lambda: read("--config nowhere")).startswith("--config nowhere: No such file")
    assert error_line(lambda: read(f"--config {config} --model 345m")) == "give --model or --config, not both"
