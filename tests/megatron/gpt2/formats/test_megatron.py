"""Megatron's files. Real files must give the logits of the Megatron that wrote them. Files made from known weights must
be read to equal bits. Files of pipelines are read and written for every version that has pipelines."""

from __future__ import annotations

import functools
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import mpu
from megatron.gpt2.commands import checkpoint as tool
from megatron.gpt2.commands import merge_mp_partitions
from megatron.gpt2.config import ModelConfig
from megatron.gpt2.formats import BaseCheckpoint, Hints, detect_format, open_checkpoint
from megatron.gpt2.formats.compare import compare_tensors
from megatron.gpt2.formats.foreign_checkpoint import to_head_major
from megatron.gpt2.formats.megatron import flatten_state_dict, write_megatron
from megatron.gpt2.formats.megatron_model import PIPELINE_FLAG as P
from megatron.gpt2.formats.megatron_model import VIRTUAL_FLAG as V
from megatron.gpt2.formats.megatron_model import MegatronLayout
from megatron.gpt2.formats.megatron_optimizer import scheduler_state_dict
from megatron.gpt2.formats.torch_files import load_torch_file
from megatron.gpt2.model.gpt2 import model_partition_specs
from megatron.gpt2.pipeline.schedule import FIRST_LAYERS_FLAG, LAST_LAYERS_FLAG
from tests.conftest import TEST_DATA, error_line
from tests.distributed import run_ranks
from tests.megatron.gpt2.formats import sample_checkpoints
from tests.megatron.gpt2.formats.sample_checkpoints import (
    RANK_FILE,
    SHAPE,
    TOLERANCE,
    assert_refused,
    changed,
    compute_logits,
    in_memory_checkpoint,
    next_learning_rate,
    random_weights,
    same,
    silent,
)

GENUINE = ("megatron-2019/tp1", "megatron-2019/tp2", "megatron-2019/tp4", "megatron-v2.6/tp1", "megatron-v2.6/tp2")
TRUE_VOCAB_SIZE = 130
genuine = pytest.mark.skipif(not (TEST_DATA / GENUINE[0]).is_dir(), reason=f"{TEST_DATA} has no genuine checkpoints")
HINTS = Hints(vocab_size=SHAPE.vocab_size)
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


# --- genuine files


def open_genuine(name: str, vocab_size: int | None = TRUE_VOCAB_SIZE, **more: Any) -> BaseCheckpoint:
    """Open a real checkpoint. Megatron's files of 2019 lack the number of heads, so a hint gives the number."""
    hints = Hints(4 if "2019" in name else None, vocab_size, more.get("gelu"))
    return open_checkpoint(TEST_DATA / name / "checkpoint", hints, log=more.get("log", silent))


def differences(rank: int, world_size: int, gelu: str | None = None) -> list[float]:
    """Return for each real checkpoint how far its logits are from the logits of the Megatron that wrote it."""
    mpu.initialize_model_parallel(world_size)
    found = []
    for name in GENUINE:
        tokens = torch.from_numpy(np.load(TEST_DATA / name / "tokens.npy"))
        theirs = torch.from_numpy(np.load(TEST_DATA / name / "logits.npy"))[..., :TRUE_VOCAB_SIZE]
        found.append((compute_logits(open_genuine(name, gelu=gelu), tokens) - theirs).abs().max().item())
    return found


@genuine
@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.wide)])
def test_logits_of_genuine_files(world_size: int):
    for found in run_ranks(differences, world_size):
        assert max(found) < TOLERANCE, dict(zip(GENUINE, found, strict=True))


@genuine
def test_the_inferred_gelu_is_the_right_one():
    assert {open_genuine(name).metadata["config"]["model"]["gelu"] for name in GENUINE} == {"tanh"}
    (wrong,) = run_ranks(differences, 1, "erf")
    assert min(wrong) > 2 * TOLERANCE, "the tolerance tells the two forms apart"


@genuine
@pytest.mark.parametrize("name", GENUINE)
def test_merges_are_bit_identical(name: str):
    merged = open_genuine(name)
    assert merged.iteration == 18
    assert detect_format(merged.path.parent)[0] == ("megatron-2019" if "2019" in name else "megatron-v2")
    difference = compare_tensors(merged, open_genuine(f"{name.split('/')[0]}/tp1"))
    assert difference.equal and len(difference.rows) == 40
    assert {merged.tensors[row.name].dtype for row in difference.rows} == {torch.float16}
    if "2019" not in name:
        assert merged.metadata["consumed_samples"] == 72 and any("random" in line for line in merged.left_out)


@genuine
def test_without_a_flag_the_vocabulary_is_the_padded_size():
    name, lines = "model.word_embeddings.weight", list[str]()
    source = open_genuine("megatron-2019/tp4", None, log=lines.append)
    assert source.metadata["vocab_size"] == 160 == source.tensors[name].shape[0]
    assert "--vocab-size" in lines[-1] and "160" in lines[-1]
    assert torch.equal(source.read(name)[:TRUE_VOCAB_SIZE], open_genuine("megatron-2019/tp4").read(name))


@functools.cache
def two_ranks() -> list[dict[str, Any]]:
    folder = TEST_DATA / "megatron-2019/tp2/checkpoint/iter_0000018"
    return [load_torch_file(folder / f"mp_rank_{rank:02d}" / RANK_FILE) for rank in range(2)]


def joined(specs: dict[str, mpu.PartitionSpec], kind: str, name: str) -> Tensor:
    """Merge the optimizer state of one parameter from the two files of `two_ranks`."""
    shards = []
    for top in two_ranks():
        vector = top["model"][name].dim() == 1
        index = [other for other, x in top["model"].items() if (x.dim() == 1) == vector].index(name)
        held = top["optimizer"]
        if kind == "master":
            shards.append(held["fp32_from_fp16"][vector][index])
        else:
            number = held["optimizer_state_dict"]["param_groups"][vector]["params"][index]
            shards.append(held["optimizer_state_dict"]["state"][number][kind])
    # The test of logits checks the order of QKV and the split dimensions for the weights.
    ordered = [to_head_major(shard, 2) if "query_key_value" in name else shard for shard in shards]
    spec = specs[name]
    return shards[0] if spec.dim is None else torch.cat(ordered, spec.dim)[: spec.global_shape[0]]


@genuine
def test_the_optimizer_of_2019_goes_on():
    source = open_genuine("megatron-2019/tp2")
    specs = model_partition_specs(ModelConfig(**source.metadata["config"]["model"]))
    for tensor in source.tensors:
        kind, _, name = tensor.partition(".")
        if kind != "model":
            assert torch.equal(source.read(tensor), joined(specs, kind, name)), tensor
    assert source.metadata["optimizer"] == {
        "num_updates": 3,
        "skipped_steps": 15,
        "adam_steps": 3,
        "loss_scaler": {"scale": 2.0**18, "clean_steps": 3.0, "hysteresis_left": 1.0},
    }
    assert next_learning_rate(source) == pytest.approx(0.03 * (1 - 2 / 99))


@genuine
def test_heads_that_are_missing_or_do_not_divide():
    older, newer = TEST_DATA / "megatron-2019/tp2/checkpoint", TEST_DATA / "megatron-v2.6/tp1/checkpoint"
    for path, words, hints in (
        (older, ("--num-attention-heads", "2, 4, 8"), {}),
        (older, ("--num-attention-heads", "2, 4, 8"), {"num_attention_heads": 5}),
        (older, ("--num-attention-heads",), {"num_attention_heads": 1}),  # Two ranks cannot share one head.
        (newer, ("--num-attention-heads",), {"num_attention_heads": 8}),
        (newer, ("--vocab-size 137", "136"), {"vocab_size": 137}),
        (newer, ("iteration 20",), {"iteration": 20}),
    ):
        assert_refused(path, *words, **hints)
    assert open_checkpoint(newer, Hints(vocab_size=TRUE_VOCAB_SIZE, iteration=18), log=silent).iteration == 18


def test_ranks_of_two_iterations_or_two_runs(tmp_path: Path):
    first = sample_checkpoints.write_megatron(tmp_path, random_weights(), "v2", version=3, tp=2)
    file = first.parents[1] / "mp_rank_01" / RANK_FILE
    changed(file, lambda top: top.update(iteration=8))
    assert_refused(tmp_path, "two iterations", "7", "8")
    changed(file, lambda top: top.update(iteration=7))
    changed(file, lambda top: top["model"]["language_model"]["embedding"]["position_embeddings"]["weight"][3].add_(1))
    assert_refused(tmp_path, "position_embeddings.weight", "mp_rank_01", "mixed")


# --- files of every version, made of known weights

# Each case has form, checkpoint_version, tensor-parallel size, pipeline stages, legacy stream, and the format's name.
MADE = [
    ("flat", 0, 1, 1, True, "megatron-2019"),
    ("flat", 0, 4, 1, False, "megatron-2019"),
    ("v1", 0, 2, 2, False, "megatron-v1"),
    ("v1", 1, 2, 2, False, "megatron-v1"),
    ("v1", 2, 4, 1, False, "megatron-v2"),
    ("v2", 3, 2, 4, False, "megatron-v2"),
    ("core", 3, 2, 2, False, "megatron-core"),
    ("fused", 3, 4, 2, False, "megatron-core"),
]


@pytest.mark.parametrize("case", MADE)
def test_every_version_is_read_to_the_last_bit(tmp_path: Path, case: tuple[Any, ...]):
    weights, (form, version, tp, pp, legacy, format) = random_weights(), case
    sample_checkpoints.write_megatron(tmp_path, weights, form, version=version, tp=tp, pp=pp, legacy=legacy)
    source = open_checkpoint(tmp_path, HINTS)
    assert source.format == format and list(source.tensors) == [f"model.{name}" for name in weights]
    assert same(source, weights)
    assert ModelConfig(**source.metadata["config"]["model"]) == SHAPE


def test_a_release_holds_weights_alone(tmp_path: Path):
    """NVIDIA's released checkpoint is in a folder named `release`. The checkpoint has no arguments and no optimizer."""
    weights = random_weights()
    sample_checkpoints.write_megatron(tmp_path, weights, "flat", tp=2, legacy=True, with_args=False)
    (tmp_path / "iter_0000007").rename(tmp_path / "release")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release")
    source = open_checkpoint(tmp_path, replace(HINTS, num_attention_heads=4))
    assert (source.path, source.format) == (tmp_path / "release", "megatron-2019") and not source.left_out
    assert same(source, weights)
    assert_refused(tmp_path, "--num-attention-heads")


def test_an_optimizer_in_another_order_or_an_incomplete_one_is_left_out(tmp_path: Path):
    write_megatron(in_memory_checkpoint(2, F16), tmp_path, "megatron-v2", log=silent)
    file = tmp_path / f"iter_0000007/mp_rank_00/{RANK_FILE}"

    def exchange(top: dict[str, Any]) -> None:
        biases = top["optimizer"]["fp32_from_fp16_params"][1]
        biases[0], biases[1] = biases[1], biases[0]  # Only biases of equal shape can be exchanged without an error.

    changed(file, lambda top: top["optimizer"]["grad_scaler"].update(hysteresis_tracker=-1))
    read = open_checkpoint(tmp_path, log=silent)
    assert read.metadata["optimizer"]["loss_scaler"]["hysteresis_left"] == 1.0
    for change in (exchange, lambda top: top["optimizer"]["fp32_from_fp16_params"][0].pop()):
        changed(file, change)
        source = open_checkpoint(tmp_path, log=silent)
        assert "optimizer" in source.left_out[0] and not any("exp_avg" in name for name in source.tensors)


def test_the_schedule_after_a_batch_ramp_up_is_in_samples():
    """The schedule counts the 5 consumed samples, which are not a multiple of the batch size."""
    source = in_memory_checkpoint(2, F16)
    source.metadata |= {"global_batch_size": 2, "consumed_samples": 5}
    source.metadata["config"]["train"]["rampup_batch_size"] = [1, 1, 3]
    grown = scheduler_state_dict(source, "megatron-v2", print)
    assert (grown["num_steps"], grown["decay_steps"], grown["warmup_steps"]) == (5, 200, 20)


def test_other_models_and_forms_of_gelu(tmp_path: Path):
    file = sample_checkpoints.write_megatron(tmp_path, random_weights(), "core", version=3)
    for values, gelu in (({"bias_gelu_fusion": False}, "erf"), ({"openai_gelu": True}, "tanh")):
        changed(file, lambda top: vars(top["args"]).update(values))  # noqa: B023
        assert open_checkpoint(tmp_path, log=silent).metadata["config"]["model"]["gelu"] == gelu
    assert open_checkpoint(tmp_path, Hints(gelu="erf"), log=silent).metadata["config"]["model"]["gelu"] == "erf"
    changed(file, lambda top: vars(top["args"]).update(swiglu=True))
    assert_refused(tmp_path, "swiglu")
    extra = {"decoder.layers.3.self_attention.q_norm.weight": torch.ones(12)}
    changed(file, lambda top: top.update(args=None, model=top["model"] | extra))
    assert_refused(tmp_path, "q_norm", num_attention_heads=4)


# --- pipelines, written

# Each case has format, layers, layout and dtype.
QUICK = [
    ("megatron-v2", 4, MegatronLayout(2, 2), F16),
    ("megatron-v3", 6, MegatronLayout(1, 3, virtual_layers=1), BF16),
    ("megatron-core", 4, MegatronLayout(1, 3, first=1, last=1), BF16),
    ("megatron-core", 4, MegatronLayout(1, 2, virtual_layers=1), F32),
]
LAYOUTS = (MegatronLayout(2, 4, virtual_layers=1), MegatronLayout(1, 3, virtual_layers=2))
LAYOUTS_OF_CORE = (*LAYOUTS, MegatronLayout(2, 3, virtual_layers=2, first=2, last=2), MegatronLayout(4, 2, first=5))
WIDE = [("megatron-v2", 12, layout, F32) for layout in LAYOUTS]
WIDE += [("megatron-v3", 12, layout, F16) for layout in LAYOUTS]
WIDE += [("megatron-core", 12, layout, BF16) for layout in LAYOUTS_OF_CORE]


@pytest.mark.parametrize("case", [*QUICK, *(pytest.param(case, marks=pytest.mark.wide) for case in WIDE)])
def test_there_and_back(tmp_path: Path, case: tuple[str, int, MegatronLayout, torch.dtype]):
    format, num_layers, layout, dtype = case
    source, with_optimizer = in_memory_checkpoint(num_layers, dtype), format != "megatron-core"
    path = write_megatron(source, tmp_path / "theirs", format, layout, log=silent)
    t, p, v = layout.tensor, layout.pipeline, layout.virtual(num_layers)
    back = open_checkpoint(tmp_path / "theirs", log=pytest.fail)
    assert back.format == format and not back.left_out
    virtual = {"virtual_pipeline_model_parallel_size": v} if v > 1 else {}
    assert back.metadata["layout"] == {"tensor_model_parallel_size": t, "pipeline_model_parallel_size": p, **virtual}
    difference = compare_tensors(source, back)
    assert difference.equal and len(difference.rows) == (4 if with_optimizer else 1) * (4 + 12 * num_layers)
    if with_optimizer:
        assert back.metadata["optimizer"] == source.metadata["optimizer"]
        known = {"lr": 0.2, "lr_warmup_fraction": 0.1, "lr_decay_style": "cosine", "weight_decay": 0.1, "min_lr": 0.1}
        assert known.items() <= back.metadata["config"]["optimizer"].items()
    for rank in range(t):
        for stage in range(p):
            top = load_torch_file(path / f"mp_rank_{rank:02d}_{stage:03d}" / RANK_FILE)
            as_megatron_splits(top, source, layout, rank, stage)
    assert len(list(path.iterdir())) == t * p
    assert back.metadata["config"]["train"] == source.metadata["config"]["train"]


def as_megatron_splits(
    top: dict[str, Any], source: BaseCheckpoint, layout: MegatronLayout, rank: int, stage: int
) -> None:
    """Check that a rank's file has the layers of its stage, by Megatron's own formulas (ParallelTransformer of v2.6,
    get_transformer_layer_offset of Core). The QKV rows already have the order [heads, 3, head size], so they equal the
    rank's shard."""
    num_layers = source.metadata["config"]["model"]["num_layers"]
    p, v = layout.pipeline, layout.virtual(num_layers)
    middle = num_layers - (layout.first or 0) - (layout.last or 0)
    sizes = [middle // (p - (layout.first is not None) - (layout.last is not None))] * p
    sizes[0], sizes[-1] = layout.first or sizes[0], layout.last or sizes[-1]
    for chunk in range(v):
        model = flatten_state_dict(top[f"model{chunk}" if v > 1 else "model"])
        offset = chunk * (num_layers // v) + sum(size // v for size in sizes[:stage])
        numbers = {int(number) for name in model for number in re.findall(r"layers\.(\d+)", name)}
        assert numbers == set(range(sizes[stage] // v))
        for number in numbers:
            (qkv,) = [n for n in model if f".{number}." in n and n.endswith(("qkv.weight", "query_key_value.weight"))]
            whole = source.read(f"model.transformer.layers.{offset + number}.attention.query_key_value.weight")
            assert torch.equal(model[qkv], whole.chunk(layout.tensor)[rank]), qkv
        first, last = stage == chunk == 0, stage == p - 1 and chunk == v - 1
        heads = [name for name in model if name.startswith(("output_layer", "word_embeddings_for_head"))]
        assert any("position_embeddings" in name for name in model) == first
        assert any("final_layernorm" in name for name in model) == bool(heads) == last
        # The padding repeats the last token, because Megatron's softmax includes it, and zeros would have logits of 0.
        true = source.read("model.word_embeddings.weight")
        for matrix in (model[name] for name in model if name in heads or "word_embeddings" in name):
            padded = torch.cat([true, true[-1:].expand(len(matrix) * layout.tensor - len(true), -1)])
            assert torch.equal(matrix, padded.chunk(layout.tensor)[rank])


def test_a_stage_that_is_missing_or_of_another_run_is_named(tmp_path: Path):
    write_megatron(in_memory_checkpoint(6, F16), tmp_path, "megatron-v2", MegatronLayout(2, 3, 1), log=silent)
    file = tmp_path / f"iter_0000007/mp_rank_01_001/{RANK_FILE}"
    changed(file, lambda top: top.pop("model1"))
    assert_refused(tmp_path, str(file), f"mp_rank_00_000/{RANK_FILE} holds model0, model1")
    shutil.rmtree(file.parent)
    missing = f"mp_rank_01_001/{RANK_FILE} is missing"
    assert_refused(tmp_path, missing, "2 tensor-parallel ranks", "3 pipeline stages")


def test_copies_of_the_tied_matrix_that_differ_are_named(tmp_path: Path):
    source, folder = in_memory_checkpoint(4, F16), tmp_path / "theirs"
    path = write_megatron(source, folder, "megatron-v3", MegatronLayout(2, 2), log=silent)
    file, name = path / f"mp_rank_01_001/{RANK_FILE}", "word_embeddings_for_head.weight"
    changed(file, lambda top: top["optimizer"]["fp32_from_fp16_params"][0][-1][3, 3].add_(1))
    (line,) = open_checkpoint(folder, log=silent).left_out
    assert "the optimizer's state" in line and f"master.{name}" in line
    changed(file, lambda top: top["model"]["word_embeddings_for_head"]["weight"][3, 3].add_(1))
    assert_refused(folder, str(file), f"mp_rank_01_000/{RANK_FILE}", f"model.{name}")


def test_the_program_reads_and_writes_pipelines(tmp_path: Path, capsys: pytest.CaptureFixture):
    theirs, deeper, single = (str(tmp_path / name) for name in ("theirs", "deeper", "single"))
    write_megatron(in_memory_checkpoint(4, F32), theirs, "megatron-v2", MegatronLayout(1, 2), log=silent)
    assert tool.main(["inspect", theirs]) == 0
    assert re.search(r"^pipeline model parallel size +2$", capsys.readouterr().out, re.MULTILINE)
    layout = f"--model-parallel-size 2 --target-pipeline-model-parallel-size 2 {V} 1".split()
    assert tool.main(["convert", theirs, deeper, "--to", "megatron-core", "--check", *layout]) == 0
    said = capsys.readouterr().out
    assert "(megatron-core, 2 tensor-parallel ranks of 2 pipeline stages)\n" in said and "in fp32: 0\n" in said
    merge = ["--load", deeper, "--save", single, "--tensor-model-parallel-size", "2", P]
    with pytest.raises(ValueError, match=f"{P} 4: the files of .* have 2"):
        merge_mp_partitions.main([*merge, "4"])
    assert merge_mp_partitions.main([*merge, "2"]) == 0
    for other, folders in ((deeper, 4), (single, 1)):
        assert tool.main(["diff", theirs, other]) == 0, other
        assert len(list(Path(other).glob("*/mp_rank_0[01]*"))) == folders


REFUSED = {
    f"megatron-2019 {P} 2": f"{P} 2: megatron-2019 has no pipeline; use megatron-v2, megatron-v3, megatron-core",
    f"native {P} 2": "this writes native, which loads under any of them",
    f"megatron-v2 {P} 0": f"{P} must be positive, not 0",
    f"megatron-v2 {P} 3": f"{P} 3 does not divide the 4 layers",
    f"megatron-core {P} 3": f"give {FIRST_LAYERS_FLAG} and {LAST_LAYERS_FLAG}",
    f"megatron-v3 {P} 2 {FIRST_LAYERS_FLAG} 1": "only megatron-core has stages of different sizes, not megatron-v3",
    f"megatron-core {P} 3 {FIRST_LAYERS_FLAG} 1": f"{P} 3 does not divide",
    f"megatron-v3 {P} 2 {V} 1": f"{V} needs {P} of at least 3 in megatron-v3",
    "native --model-parallel-size 3": "--num-attention-heads 4 is not divisible",
    "megatron-core --model-parallel-size 3": "--tensor-model-parallel-size 3 does not divide",
}


def test_layouts_that_megatron_cannot_load_are_refused(tmp_path: Path):
    source = in_memory_checkpoint(4, F32)
    for words, message in REFUSED.items():
        to, *flags = words.split()
        given = tool.parse_args(["convert", "IN", str(tmp_path / "out"), "--to", to, *flags])
        said = error_line(lambda: tool.write_format(given, source, to, tool.layout_from_args(given)))  # noqa: B023
        assert message in said, (words, said)
    assert not (tmp_path / "out").exists()
