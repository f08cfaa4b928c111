"""Test the rules for flags of other programs: each flag in `flag_lists/` has a rule. Keys of a --deepspeed_config are
translated, ignored or refused, and flags override them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron.gpt2.config.arguments import Arguments, parse
from megatron.gpt2.config.compat import MEGATRON_RULES, find_rule
from megatron.gpt2.config.flags import build_parser
from tests.conftest import error_line, tool

ROOT = Path(__file__).resolve().parents[4]
LISTS = {path.stem: path for path in (ROOT / "tests/megatron/gpt2/config/flag_lists").glob("*.txt")}


def names(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines() if not line.startswith("#")]


@pytest.mark.parametrize("source", LISTS)
def test_every_flag_of_each_program_has_a_rule(source: str):
    own = build_parser()._option_string_actions
    asked = [name.replace("_", "-") for name in names(LISTS[source])]
    assert len(asked) > 30
    assert [name for name in asked if name not in own and find_rule(MEGATRON_RULES, name) is None] == []


def error_of(line: str) -> str:
    return error_line(lambda: parse(line.split()))


def test_every_refusal_names_the_flag_and_an_alternative():
    refused = [(name, rule) for name, rule in MEGATRON_RULES.items() if rule.status == "refused"]
    assert len(refused) >= 100
    for name, rule in refused:
        said = error_of(f"{name.replace('*', 'x')} 1")
        assert said.startswith(name.removesuffix("*")) and said.endswith(rule.text)
        assert re.search(r"--[a-z]|leave|take it out|evaluate_gpt2|tools/|iteration.txt", rule.text), rule.text


def test_all_errors_are_in_one_line():
    said = error_of("--swiglu --num-layerz 3 --num-experts 8 --zzz 1 --qk-clip --precision fp9 --yaml-cfg a")
    assert said.startswith("unknown flags --num-layerz: did you mean --num-layers?, --zzz: --help lists the flags; ")
    assert "; --precision: invalid choice: 'fp9' (choose from auto, " in said
    assert "; --num-experts 8 is not supported, only 1: no other value is implemented; " in said
    assert "; --swiglu, --qk-clip are not supported: not implemented here; leave it out; --yaml" in said


def test_only_a_typing_error_gets_a_hint():
    for name in ("--disable-log-anything", "--no-sequence-parallel", "--learning-rate"):
        assert error_of(name) == f"unknown flag {name}: --help lists the flags"
    for name, hint in (("--tensorboard-dri", "--tensorboard-dir"), ("-num-layers", "--num-layers")):
        assert error_of(f"{name} 3") == f"unknown flag {name}: did you mean {hint}?"


def test_beginnings_and_opposites():
    notes = parse(
        "--moe-router-topk 2 --moe-anything --no-tp-comm-overlap-ag --disable-log-energy --fp8-recipe x".split()
    ).notes
    assert len(notes) == 3 and all(": ignored: " in note for note in notes)
    assert find_rule(MEGATRON_RULES, "--no-bf16") is find_rule(MEGATRON_RULES, "--no-swiglu") is None


@pytest.mark.parametrize(
    "line, message",
    {
        "--zero-stage 3": "--zero-stage 3 is not implemented: ",
        "--pipe-parallel-size x": "--pipe-parallel-size x is not a whole number",
        "--remote-device nvme": "--remote-device nvme is not supported, only none",
        "--load-openai --load x": "tools/checkpoint.py convert",
        "--kv-channels 32 --hidden-size 64 --num-attention-heads 4": "--kv-channels 32 is not --hidden-size / ",
        "--num-query-groups 2 --num-attention-heads 4": "--num-query-groups 2 is not --num-attention-heads: leave",
        "--group-query-attention": "--group-query-attention is not supported",
        "--use-mup --mup-base-hidden-size 64": "--use-mup is not supported: attention divides by √d",
        "--optimizer dist_muon": "--optimizer dist_muon is not supported: give --optimizer muon --use-dist",
        "--lr-decay-tokens 100": "--lr-decay-tokens 100 needs --seq-length",
        "--no-pipeline-parallel --pipeline-model-parallel-size 2": "contradicts --pipeline-model-parallel-size 2",
        "--no-bias-gelu-fusion --gelu tanh": "--no-bias-gelu-fusion contradicts --gelu tanh",
        "--tokenizer-type HuggingFaceTokenizer": "Tokenizer is not supported: give --vocab-file vocab.json",
        "--n-layer 4 --block-size 64": "--n-layer 4, --block-size 64 are not supported: nanoGPT's; give --num-layers",
        "--compile=False": "--compile: leave out the value 'False'",
    }.items(),
)
def test_refused(line: str, message: str):
    assert message in error_of(line)


def test_the_page_of_flags_is_up_to_date():
    page = tool("flag_table").flags_page()
    assert ": only 1: parallelism is tensor, pipeline and data: use --tensor-model-parallel-size" in page
    without_effect = {name for name, rule in MEGATRON_RULES.items() if rule.status == "ignored" and not rule.accepts}
    names = {*build_parser()._option_string_actions, *MEGATRON_RULES} - without_effect - {"-h", "--help"}
    assert all(f"`{name}`" in page for name in names)
    assert len(page.split()) < 3000
    assert (ROOT / "docs" / "reference" / "flags.md").read_text() == page, (
        "python tools/flag_table.py > docs/reference/flags.md"
    )


# The keys that occur most often in DeepSpeed's examples and documentation
WHOLE = """
    {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.5, "steps_per_print": 10, "wall_clock_breakdown": false, "fp16": {"enabled": true,
    "loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 500, "hysteresis": 3, "min_loss_scale": 2},
    "bf16": {"enabled": false}, "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu", "pin_memory":
    true}, "offload_param": {"device": "none"}, "reduce_bucket_size": 50000000.0, "overlap_comm": true}, "optimizer":
    {"type": "AdamW", "params": {"lr": 0.0003, "betas": [0.8, 0.99], "eps": 1e-07, "weight_decay": 0.1}},
    "activation_checkpointing": {"partition_activations": true, "cpu_checkpointing": true}, "scheduler": null, "amp":
    {"enabled": false}}
"""


def read(folder: Path, content: str, *flags: str) -> Arguments:
    (folder / "ds.json").write_text(content)
    return parse(["--deepspeed", "--deepspeed_config", str(folder / "ds.json"), *flags])


def test_translated_keys(tmp_path: Path):
    same = (
        "--global-batch-size 32 --micro-batch-size 4 --clip-grad .5 --precision fp16-on-gpu "
        "--initial-loss-scale 65536 --loss-scale-window 500 --hysteresis 3 --min-loss-scale 2 --lr 3e-4 "
        "--adam-beta1 .8 --adam-beta2 .99 --adam-eps 1e-7 --weight-decay .1 --use-distributed-optimizer "
        "--cpu-offload-optimizer --ddp-bucket-size 50000000 --partition-activations --checkpoint-in-cpu"
    )
    arguments = read(tmp_path, WHOLE)
    assert arguments.config == parse(same.split()).config
    notes = "\n".join(arguments.notes)
    assert "train_batch_size 32: read as --global-batch-size" in notes
    assert "gradient_accumulation_steps 2: read as --gradient-accumulation-steps, unless" in notes
    assert "WARNING" not in notes and "scheduler" not in notes and "bf16" not in notes
    assert "parallel.use_distributed_optimizer" in arguments.given


def test_disabled_and_automatic_keys_and_the_old_offload(tmp_path: Path):
    content = """
        {"train_batch_size": "auto", "bf16": {"enabled": true}, "zero_optimization": {"stage": 0, "cpu_offload": true},
        "fp16": {"enabled": false, "loss_scale": 8}}
    """
    same = "--bf16 --cpu-offload-optimizer --zero-stage 0"
    assert read(tmp_path, content).config == parse(same.split()).config
    assert read(tmp_path, '{"fp16": {"enabled": true, "loss_scale": 8}}').config.optimizer.loss_scale == 8.0


def test_a_flag_wins_and_a_note_says_so(tmp_path: Path):
    arguments = read(tmp_path, WHOLE, *"--clip-grad 1.0 --batch-size 4 --fp16".split())
    assert arguments.config.optimizer.clip_grad == 1.0
    notes = "\n".join(arguments.notes)
    assert "gradient_clipping 0.5: ignored: --clip-grad 1.0 is given" in notes
    assert len(re.findall("ignored: --.* is given", notes)) == 1


def test_unknown_keys_are_noted(tmp_path: Path):
    notes = read(tmp_path, '{"nonsense": 3, "zero_optimization": {"stge": 1}}').notes
    assert notes[-1].startswith("WARNING") and "nonsense, zero_optimization.stge: unknown keys are ignored" in notes[-1]


@pytest.mark.parametrize(
    "content, message",
    [
        ('{"zero_optimization": {"stage": 3}}', "zero_optimization.stage 3 is not implemented: every data-parallel"),
        ('{"zero_optimization": {"stage": [1]}}', "[1] is not a stage of ZeRO"),
        (
            '{"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}',
            "splits the weights, --cpu-offload-optimizer moves the optimizer to the host",
        ),
        ('{"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}', "only cpu or none"),
        ('{"optimizer": {"type": "Lamb"}}', "optimizer.type Lamb is not supported, only Adam or AdamW"),
        ('{"optimizer": {"type": "Adam", "params": {"adam_w_mode": false}}}', "the optimizer is AdamW"),
        ('{"optimizer": {"params": {"betas": 0.9}}}', "optimizer.params.betas 0.9 is not a pair"),
        ('{"scheduler": {"type": "WarmupLR"}}', "--lr-decay-style"),
        ('{"amp": {"enabled": true}}', 'amp {"enabled": true} is not supported: give --precision'),
        ('{"train_batch_size": "16"}', "train_batch_size 16 is not a whole number but a str"),
        ('{"fp16": {"enabled": true, "initial_scale_power": 5000}}', "fp16.initial_scale_power"),
        ("[1]", "is not a JSON object"),
        ("{", "is not JSON"),
    ],
)
def test_refused_in_one_line(tmp_path: Path, content: str, message: str):
    said = error_line(lambda: read(tmp_path, content))
    assert said.startswith(f"--deepspeed_config {tmp_path / 'ds.json'}") and message in said


def test_a_missing_file_is_reported_with_the_other_errors():
    said = error_of("--swiglu --deepspeed_config nowhere.json")
    assert said.startswith("--swiglu is not")
    assert said.endswith("; --deepspeed_config nowhere.json: No such file or directory")


def test_a_batch_size_of_the_file_is_named_by_its_key(tmp_path: Path):
    flags = "--gas 2 --micro-batch-size 1".split()
    arguments = read(tmp_path, '{"train_batch_size": 256}', *flags)
    assert arguments.build_batch_schedule(128).final == 256
    with pytest.raises(ValueError) as error:
        arguments.build_batch_schedule(1)
    assert str(error.value).startswith(
        f"train_batch_size in {tmp_path / 'ds.json'} 256 is not --micro-batch-size 1 × 1 "
    )
    with pytest.raises(ValueError, match="^optimizer.params.lr in .*ds.json must be positive, not -1.0$"):
        _ = read(tmp_path, '{"optimizer": {"params": {"lr": -1}}}').config
