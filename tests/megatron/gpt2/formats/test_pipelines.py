"""Megatron's files of a pipeline: read from every version that has one, and written for it, to the last bit."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron.gpt2.commands import merge_mp_partitions
from megatron.gpt2.commands.checkpoint import arguments, layout_of, main, write
from megatron.gpt2.formats import Hints, Source, open_source
from megatron.gpt2.formats.compare import diff
from megatron.gpt2.formats.megatron import write_megatron
from megatron.gpt2.formats.megatron_model import Layout
from megatron.gpt2.formats.native import write_native
from megatron.gpt2.formats.torch_files import load_pickle
from tests.conftest import TEST_DATA
from tests.megatron.gpt2.formats.made import made_source
from tests.megatron.gpt2.formats.test_megatron import TOLERANCE, TRUE_VOCABULARY, logits_of, silent

# format, layers, layout, dtype
QUICK = [
    ("megatron-v2", 4, Layout(2, 2), torch.float16),
    ("megatron-v3", 6, Layout(1, 3, virtual_layers=1), torch.bfloat16),
    ("megatron-core", 4, Layout(1, 3, first=1, last=1), torch.bfloat16),
    ("megatron-core", 4, Layout(1, 2, virtual_layers=1), torch.float32),
]
WIDE = [
    (format, 12, layout, dtype)
    for format, dtype in (
        ("megatron-v2", torch.float32),
        ("megatron-v3", torch.float16),
        ("megatron-core", torch.bfloat16),
    )
    for layout in (
        Layout(1, 2),
        Layout(2, 2),
        Layout(1, 4),
        Layout(2, 4, virtual_layers=1),
        Layout(1, 3, virtual_layers=2),
    )
]
WIDE += [
    ("megatron-core", 12, layout, torch.float32)
    for layout in (
        Layout(1, 2, virtual_layers=3),
        Layout(2, 3, virtual_layers=2, first=2, last=2),
        Layout(1, 3, first=1, last=3),
        Layout(4, 2, first=5),
        Layout(1, 4, last=3),
    )
]
# The folders of genuine files by their names, and the layout of the ranks that wrote them.
GENUINE = {
    "pp2": Layout(1, 2),
    "tp2_pp2": Layout(2, 2),
    "pp4": Layout(1, 4),
    "pp2_v2": Layout(1, 2, virtual_layers=1),
    "pp3_v2": Layout(1, 3, virtual_layers=1),
    "pp3_uneven": Layout(1, 3, first=1, last=1),
}
FOLDERS = sorted(str(path.parent.relative_to(TEST_DATA)) for path in TEST_DATA.glob("megatron-*/*pp*/logits.npy"))
QUICK_FOLDERS = ("megatron-v2.6/pp3_v2", "megatron-v3/tp2_pp2", "megatron-core/pp2_v2")
P, V = "--pipeline-model-parallel-size", "--num-layers-per-virtual-pipeline-stage"
FIRST, LAST = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"
genuine = pytest.mark.skipif(not FOLDERS, reason=f"{TEST_DATA} has no genuine checkpoints of a pipeline")


@pytest.mark.parametrize(
    ("format", "num_layers", "layout", "dtype"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.wide) for case in WIDE)],
)
def test_there_and_back(tmp_path: Path, format: str, num_layers: int, layout: Layout, dtype: torch.dtype):
    source = made_source(num_layers, dtype)
    path = write_megatron(source, tmp_path / "theirs", format, layout, log=silent)
    t, p, v = layout.tensor, layout.pipeline, layout.virtual(num_layers)
    assert sorted(file.parent.name for file in path.glob("*/model_optim_rng.pt")) == [
        f"mp_rank_{rank:02d}_{stage:03d}" for rank in range(t) for stage in range(p)
    ]
    back = open_source(tmp_path / "theirs", log=pytest.fail)
    assert back.format == format and not back.left_out
    assert back.facts["layout"] == {
        "model_parallel_size": t,
        "pipeline_parallel_size": p,
        **({"virtual_pipeline_parallel_size": v} if v > 1 else {}),
    }
    difference = diff(source, back)
    tensors = 4 + 12 * num_layers
    assert difference.equal and len(difference.rows) == (tensors if format == "megatron-core" else 4 * tensors)
    if format != "megatron-core":
        assert back.facts["optimizer"] == source.facts["optimizer"]
        assert back.facts["config"]["optimizer"] == {
            **back.facts["config"]["optimizer"],
            "lr": 0.2,
            "warmup": 0.1,
            "lr_decay_style": "cosine",
            "weight_decay": 0.1,
            "min_lr": 0.1,
        }
    for rank in range(t):
        for stage in range(p):
            _as_megatron_splits(
                load_pickle(path / f"mp_rank_{rank:02d}_{stage:03d}/model_optim_rng.pt"),
                source,
                format,
                layout,
                rank,
                stage,
            )
    write_native(back, tmp_path / "ours", model_parallel_size=1, log=silent)
    assert diff(source, open_source(tmp_path / "ours", log=silent)).equal


def _as_megatron_splits(
    top: dict[str, Any], source: Source, format: str, layout: Layout, rank: int, stage: int
) -> None:
    """The file's layers are those that Megatron's own formulas give its stage (ParallelTransformer of v2.6,
    get_transformer_layer_offset of Core), and their QKV, which needs no change of order, is the rank's part."""
    num_layers = source.facts["config"]["model"]["num_layers"]
    p, v = layout.pipeline, layout.virtual(num_layers)
    args = top["args"].attributes()
    assert args["pipeline_model_parallel_size"] == p and args["num_layers"] == num_layers
    assert args.get("virtual_pipeline_model_parallel_size") == (v if v > 1 else None)
    middle = num_layers - (layout.first or 0) - (layout.last or 0)
    others = p - (layout.first is not None) - (layout.last is not None)
    sizes = [
        layout.first
        if r == 0 and layout.first is not None
        else layout.last
        if r == p - 1 and layout.last is not None
        else middle // others
        for r in range(p)
    ]
    for chunk in range(v):
        model = _flat(top[f"model{chunk}" if v > 1 else "model"])
        offset = chunk * (num_layers // v) + sum(size // v for size in sizes[:stage])
        weights = {
            "input_layernorm": [name for name in model if "input_layernorm.weight" in name],
            "attention.query_key_value": [
                name for name in model if "qkv.weight" in name or "query_key_value.weight" in name
            ],
        }
        for ours, theirs in weights.items():
            assert len(theirs) == sizes[stage] // v
            for name in theirs:
                (number,) = [int(word) for word in name.split(".") if word.isdigit()]
                whole = source.read(f"model.transformer.layers.{offset + number}.{ours}.weight")
                rows = len(whole) // layout.tensor if "query" in ours else len(whole)
                begin = rank * rows if "query" in ours else 0
                assert torch.equal(model[name], whole[begin : begin + rows]), name
        first, last = stage == chunk == 0, stage == p - 1 and chunk == v - 1
        assert any("position_embeddings" in name for name in model) == first
        assert any("final_layernorm" in name for name in model) == last
        assert (
            ("output_layer.weight" if format == "megatron-core" else "word_embeddings_for_head.weight") in model
        ) == last
        # Padding repeats the last token: Megatron's softmax counts it, and zeros would be logits of 0.
        true = source.read("model.word_embeddings.weight")
        for matrix in (model[name] for name in model if "word_embeddings" in name or "output_layer" in name):
            padded = torch.cat([true, true[-1:].expand(len(matrix) * layout.tensor - len(true), -1)])
            assert torch.equal(matrix, padded[rank * len(matrix) : (rank + 1) * len(matrix)])


def _flat(model: dict[str, Any], prefix: str = "") -> dict[str, Tensor]:
    return {
        name: tensor
        for key, value in model.items()
        for name, tensor in (
            _flat(value, f"{prefix}{key}.").items() if isinstance(value, dict) else [(prefix + key, value)]
        )
    }


@genuine
@pytest.mark.parametrize(
    "name", [name if name in QUICK_FOLDERS else pytest.param(name, marks=pytest.mark.wide) for name in FOLDERS]
)
def test_genuine_pipelines(tmp_path: Path, name: str):
    """Logits, weights and Adam's state of files that Megatron wrote, and these once more after a way through ours."""
    source = open_source(TEST_DATA / name / "checkpoint", Hints(vocab_size=TRUE_VOCABULARY), log=silent)
    tokens, logits = (torch.from_numpy(np.load(TEST_DATA / name / f"{file}.npy")) for file in ("tokens", "logits"))
    assert (logits_of(source, tokens) - logits[..., :TRUE_VOCABULARY]).abs().max() < TOLERANCE
    if "dist" in name:  # its files are not read
        assert "sharded optimizer" in " ".join(source.left_out)
    else:
        assert not any("optimizer" in line for line in source.left_out)
        for tensor in source.names():
            if tensor.startswith("model."):
                weight, master = source.read(tensor), source.read(tensor.replace("model", "master", 1))
                assert master.dtype == torch.float32 and torch.equal(master.to(weight.dtype), weight)
    layout = GENUINE[name.split("/")[1].removesuffix("_dist").removesuffix("_fp32")]
    for rank, stage in itertools.product(range(layout.tensor), range(layout.pipeline)):
        (file,) = source.path.glob(f"mp_rank_{rank:02d}_{stage:03d}/model*rng.pt")
        _as_megatron_splits(load_pickle(file), source, source.format, layout, rank, stage)
    for format in ("megatron-v2", "megatron-v3", "megatron-core"):
        write_megatron(source, tmp_path / format, format, Layout(2, 2), log=silent)
        back = open_source(tmp_path / format, log=pytest.fail)
        assert diff(source, back).equal and back.facts["vocab_size"] == TRUE_VOCABULARY


def changed(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """The file with what `change` does to the dictionary in it."""
    top = torch.load(path, weights_only=False)
    change(top)
    torch.save(top, path)


def refused(path: Path, *words: str) -> None:
    with pytest.raises(ValueError) as caught:
        open_source(path, log=silent)
    message = str(caught.value)
    assert "\n" not in message and all(word in message for word in words), message


def test_a_stage_that_is_missing_or_of_another_run_is_named(tmp_path: Path):
    write_megatron(
        made_source(6, torch.float16), tmp_path / "whole", "megatron-v2", Layout(2, 3, virtual_layers=1), log=silent
    )
    for gone in (
        "mp_rank_00_000",
        "mp_rank_01_001",
        "mp_rank_00_002",
        "mp_rank_01_002",
        "mp_rank_0[01]_002",
        "mp_rank_0[01]_00[12]",
        "mp_rank_01_00*",
    ):
        folder = shutil.copytree(tmp_path / "whole", tmp_path / "gone")
        files = sorted(folder.glob(f"iter_0000007/{gone}"))
        for file in files:
            shutil.rmtree(file)
        refused(folder, f"{files[0].name}/model_optim_rng.pt is missing", "2 model-parallel ranks", "3 pipeline stages")
        shutil.rmtree(folder)
    file = tmp_path / "whole/iter_0000007/mp_rank_01_001/model_optim_rng.pt"
    changed(file, lambda top: top.pop("model1"))
    refused(tmp_path / "whole", str(file), "mp_rank_00_000/model_optim_rng.pt holds model0, model1")


def test_copies_of_the_tied_matrix_that_differ_are_named(tmp_path: Path):
    first = "mp_rank_01_000/model_optim_rng.pt"
    for kind in ("model", "exp_avg_sq", "master"):
        path = write_megatron(made_source(4, torch.float16), tmp_path / kind, "megatron-v3", Layout(2, 2), log=silent)
        file = path / "mp_rank_01_001/model_optim_rng.pt"

        def change(top: dict[str, Any], kind: str = kind) -> None:
            held = top["optimizer"]
            {
                "model": top["model"].get("word_embeddings_for_head", {}).get("weight"),
                "exp_avg_sq": held["optimizer"]["state"][held["optimizer"]["param_groups"][0]["params"][-1]][
                    "exp_avg_sq"
                ],
                "master": held["fp32_from_fp16_params"][0][-1],
            }[kind][3, 3] += 1

        changed(file, change)
        refused(tmp_path / kind, str(file), first, "word_embeddings_for_head.weight", *([kind] * (kind != "model")))


def test_the_program_reads_and_writes_pipelines(tmp_path: Path, capsys: pytest.CaptureFixture):
    theirs, deeper, single = (str(tmp_path / name) for name in ("theirs", "deeper", "single"))
    write_megatron(made_source(4, torch.float32), theirs, "megatron-v2", Layout(1, 2), log=silent)
    assert main(["inspect", theirs]) == 0
    assert "model-parallel 1 × pipeline-parallel 2\n" in capsys.readouterr().out
    assert main(["verify", theirs]) == 0
    assert (
        main(
            [
                "convert",
                theirs,
                deeper,
                "--to",
                "megatron-core",
                "--model-parallel-size",
                "2",
                "--check",
                "--target-pipeline-model-parallel-size",
                "2",
                V,
                "1",
            ]
        )
        == 0
    )
    said = capsys.readouterr().out
    assert "(megatron-core, 2 model-parallel ranks of 2 pipeline stages)\n" in said and "in fp32: 0\n" in said
    assert main(["split", theirs, f"{theirs}4", "--model-parallel-size", "1", P, "4"]) == 0
    merge = ["--load", deeper, "--save", single, "--tensor-model-parallel-size", "2", P]
    with pytest.raises(ValueError, match=f"{P} 4: .* holds the files of 2"):
        merge_mp_partitions.main([*merge, "4"])
    assert merge_mp_partitions.main([*merge, "2"]) == 0
    assert main(["convert", deeper, f"{theirs}_hf", "--to", "huggingface"]) == 0
    for other, folders in ((deeper, 4), (f"{theirs}4", 4), (single, 1), (f"{theirs}_hf", 0)):
        assert main(["diff", theirs, other]) == 0, other
        assert len(list(Path(other).glob("*/mp_rank_0[01]*"))) == folders


REFUSED = {
    f"megatron-2019 {P} 2": f"{P} 2: megatron-2019 has no pipeline; megatron-v2, megatron-v3, megatron-core have one",
    f"native {P} 2": "this writes native, which loads under any of them",
    f"huggingface {P} 2": "this writes huggingface",
    f"megatron-v2 {P} 0": f"{P} must be positive, not 0",
    f"megatron-v2 {P} 3": f"{P} 3 does not divide the 4 layers",
    f"megatron-core {P} 3": f"{FIRST} and {LAST} set some apart",
    f"megatron-core {P} 8": "needs at least 8 layers",
    f"megatron-v3 {P} 2 {FIRST} 1": f"{FIRST}: the stages of megatron-v3 all hold as many layers",
    f"megatron-core {P} 3 {FIRST} 1": f"{P} 3 does not divide",
    f"megatron-core {P} 2 {FIRST} 1 {LAST} 1": "they must add up to --num-layers",
    f"megatron-v3 {P} 2 {V} 1": f"{V} needs {P} of at least 3 in megatron-v3",
    f"megatron-core {V} 1": f"{V} needs {P} of at least 2 in megatron-core",
    f"megatron-core {P} 2 {V} 0": f"{V} must be positive, not 0",
}


def test_layouts_that_megatron_cannot_load_are_refused(tmp_path: Path):
    path = write_megatron(made_source(4, torch.float32), tmp_path / "theirs", "megatron-v2", log=silent)
    source = open_source(path, log=silent)
    for words, message in REFUSED.items():
        to, *flags = words.split()
        given = arguments(["convert", "IN", str(tmp_path / "out"), "--to", to, *flags])
        with pytest.raises(ValueError) as caught:
            write(given, source, to, layout_of(given))
        assert message in str(caught.value) and "\n" not in str(caught.value), (words, str(caught.value))
    assert not (tmp_path / "out").exists()
