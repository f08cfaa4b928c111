"""DeepSpeed's checkpoints with an optimizer that ZeRO sharded. DeepSpeed 0.17.5 wrote the files, in
`7c1f71a:tests/megatron/gpt2/formats/deepspeed/make.py`."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.gpt2.commands import checkpoint
from megatron.gpt2.formats.compare import compare_tensors
from megatron.gpt2.formats.torch_files import load_torch_file
from tests.megatron.gpt2.formats.sample_checkpoints import KINDS, cases, opened, unpack

FIXTURES = Path(__file__).parent / "deepspeed"
ARCHIVE = FIXTURES / "checkpoints.tar.xz"
CASES = cases(ARCHIVE)
FP32 = "zero1_fp32_dp3-0.17.5"


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return unpack(ARCHIVE, request.param, tmp_path)


@pytest.mark.parametrize("folder", CASES, indirect=True)
def test_a_sharded_optimizer_is_what_deepspeed_held(folder: Path):
    """All checkpoints have the optimizer state of the fp32 checkpoint. In 16 bits the moments differ a little, because
    gradients are rounded and the loss scale changes."""
    for path in (folder / "global_step2", folder / "global_step2/mp_rank_00_model_states.pt", folder):
        source = opened(path)
        assert source.format == "deepspeed" and source.path == folder / "global_step2"
    dtype = source.tensors["model.word_embeddings.weight"].dtype
    with np.load(FIXTURES / "expected.npz") as held:
        assert len(held.files) * 4 == len(source.tensors) * 3 and not source.left_out
        for name in held.files:
            found = source.read(name)
            value = torch.from_numpy(held[name])[: len(found)]
            if dtype == torch.float32:
                assert torch.equal(found, value), name
            else:
                found, value = ((x / x.abs().max()).flatten() for x in (found, value))
                assert torch.cosine_similarity(found, value, dim=0) > 0.8, name
    scaler = source.metadata["optimizer"]["loss_scaler"]
    assert scaler == (
        {"scale": 512.0, "clean_steps": 2.0, "hysteresis_left": 2.0} if dtype == torch.float16 else {"scale": 1.0}
    )
    assert source.metadata["optimizer"]["adam_steps"] == source.iteration == 2
    assert source.metadata["config"]["optimizer"]["adam_beta2"] == 0.95


@pytest.mark.parametrize("folder", [FP32], indirect=True)
def test_conversion_keeps_it_and_older_files_have_other_forms(folder: Path, tmp_path: Path):
    """The test rewrites the files in the forms of older versions of DeepSpeed: without the order of the parameters, and
    with the state of each group in a list."""
    step, genuine = folder / "global_step2", opened(folder)
    out = str(tmp_path / "out")
    assert checkpoint.main(["convert", str(folder), out, "--to", "native", "--vocab-size", "29"]) == 0
    file, new = step / "mp_rank_00_model_states.pt", step / "new"  # `new` replaces `file`, which loaded tensors use.
    top = load_torch_file(file)
    args = argparse.Namespace(**top["args"].attributes())
    torch.save({**{name: top[name] for name in ("module", "iteration", "checkpoint_version")}, "args": args}, new)
    new.rename(file)
    for file in step.glob("zero*"):
        held = load_torch_file(file)["optimizer_state_dict"]
        parts, state = held["single_partition_of_fp32_groups"], held["base_optimizer_state"]["state"]
        adam = [{kind: state[number][kind][: len(part)] for kind in KINDS[2:]} for number, part in enumerate(parts)]
        older = {"base_optimizer_state": adam, "base_optimizer_state_step": 2, "partition_count": 3}
        torch.save({"optimizer_state_dict": {**older, "single_partition_of_fp32_groups": parts}}, new)
        new.rename(file.with_name(file.name.replace("_optim", "optim")))
        file.unlink()
    for other in (opened(folder), opened(Path(out))):
        assert other.tensors == genuine.tensors and compare_tensors(other, genuine).equal


@pytest.mark.parametrize("folder", [FP32], indirect=True)
def test_what_is_lost_is_one_line(folder: Path):
    files = sorted((folder / "global_step2").glob("zero*"))
    files[1].unlink()
    (line,) = opened(folder).left_out
    assert "2 of 3 files of data-parallel ranks like zero_pp_rank_0_mp_rank_00_optim_states.pt are there" in line
    files[1].write_bytes(files[0].read_bytes())
    (line,) = opened(folder).left_out
    assert "rounded, is not the weight" in line and "\n" not in line
