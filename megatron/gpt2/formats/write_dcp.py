"""A GPT-2 as a plain folder of torch.distributed.checkpoint (DCP), under Hugging Face's names, by torch's own writer.

It holds what {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, adamw)} asks for.
`model` is a GPT2LMHeadModel, sharded or not, and `adamw` has two groups: matrices, which decay, and vectors.
"""

import io
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.gpt2.checkpoint.source import Source, check_facts
from megatron.gpt2.formats.dcp_gpt2 import HEAD, TABLE
from megatron.gpt2.formats.new_folder import new_folder
from megatron.gpt2.formats.openai_names import openai_name
from megatron.gpt2.formats.write_huggingface import exported_kind, huggingface_tensor
from megatron.gpt2.formats.write_megatron import has_optimizer, on_disk
from megatron.gpt2.formats.write_nanogpt import adamw_groups
from megatron.gpt2.model.parameters import parameter_specs
from megatron.gpt2.optimizer.optimizer import MOMENTS


def write_dcp(source: Source, out: str | Path) -> Path:
    """Write `source` into the new folder `out`; returns the folder. The weights are the fp32 masters where the source
    holds them, and AdamW's state stands beside them. One tensor at a time is in memory."""
    model, kind = check_facts(source), exported_kind(source, "fp32")
    specs = parameter_specs(model)
    names = {name: f"transformer.{openai_name(name)}" for name in specs}
    with new_folder(out) as folder:

        def held(kind: str, name: str) -> Tensor:
            return on_disk(huggingface_tensor(source, model, kind, name), folder)

        state: dict[str, Any] = {f"model.{theirs}": held(kind, name) for name, theirs in names.items()}
        state[f"model.{HEAD}"] = state[f"model.transformer.{TABLE}"]
        if has_optimizer(source):
            step = torch.tensor(float(source.facts["optimizer"]["adam_steps"]))
            for name, theirs in names.items():
                state |= {f"optimizer.state.{theirs}.{moment}": held(moment, name) for moment in MOMENTS}
                state[f"optimizer.state.{theirs}.step"] = step
            for number, group in enumerate(adamw_groups(source)):
                group["params"] = [
                    theirs for name, theirs in names.items() if (len(specs[name].global_shape) == 1) == number
                ]
                state |= {f"optimizer.param_groups.{number}.{key}": value for key, value in group.items()}
        save_folder(folder, state)
    return Path(out)


def save_folder(folder: Path, state: Mapping[str, Any]) -> None:
    """`state`, whole tensors and objects by name, in the existing folder `folder`. Without a process group. An
    io.BytesIO holds the bytes that torch.save made of an object."""
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.planner import WriteItem
    from torch.distributed.checkpoint.state_dict_saver import save

    class Planner(DefaultSavePlanner):
        """The default one takes an io.BytesIO for an object."""

        def transform_object(self, write_item: WriteItem, object: Any) -> Any:
            return object if isinstance(object, io.BytesIO) else super().transform_object(write_item, object)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        save(
            dict(state),
            storage_writer=FileSystemWriter(folder),
            planner=Planner(flatten_state_dict=False),
            no_dist=True,
        )
