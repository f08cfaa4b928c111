"""Megatron's `torch_dist` format, written by torch's own DCP writer: weights, arguments and iteration.

A tensor's layers are stacked, as Megatron keeps them. They wait on the disk, so that one of them is in memory.
"""

import io
import json
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.gpt2.checkpoint.folder import TRACKER
from megatron.gpt2.checkpoint.source import Source
from megatron.gpt2.formats.foreign import TRUE_VOCABULARY
from megatron.gpt2.formats.megatron_dist import COMMON, CONFIG
from megatron.gpt2.formats.megatron_layout import Layout, chunks_of_stages
from megatron.gpt2.formats.new_folder import new_folder
from megatron.gpt2.formats.write_megatron import arguments, core_name, padded_model
from megatron.gpt2.model.parameters import parameter_specs

# Transformer Engine's names, which Megatron Core's other layers take in this format too.
FUSED = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_", "pre_mlp_layernorm.":
         "mlp.linear_fc1.layer_norm_"}
# Modules whose state of FP8 the loader looks for, of each layer; it is none.
WITH_EXTRA_STATE = ("self_attention.linear_proj", "self_attention.linear_qkv", "self_attention.core_attention",
                    "mlp.linear_fc1", "mlp.linear_fc2")
LAYERS = "decoder.layers."


def write_torch_dist(source: Source, out: str | Path, layout: Layout) -> Path:
    """Write the weights of `source` into the new folder `out`; returns the iteration's folder. They load under every
    layout; that of `layout` stands in the arguments. ValueError for one that Megatron Core does not have."""
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.planner import WriteItem
    from torch.distributed.checkpoint.state_dict_saver import save

    class Planner(DefaultSavePlanner):
        """Objects come as the bytes that torch.save made of them."""

        def transform_object(self, write_item: WriteItem, object: Any) -> Any:
            return object if isinstance(object, io.BytesIO) else super().transform_object(write_item, object)

    model = padded_model(source, layout.tensor)
    chunks_of_stages(model, layout, "megatron-core")  # checks the layout
    specs = parameter_specs(model, layout.tensor)
    stacks: dict[str, list[str]] = {}
    for name in specs:
        stacks.setdefault(dist_name(name), []).append(name)
    none = io.BytesIO()
    torch.save([None], none)
    with new_folder(out) as folder:
        path = folder / f"iter_{source.iteration:07d}"
        path.mkdir()

        def stacked(theirs: str, names: list[str]) -> Tensor:
            """[layers, ...] or, of a parameter of no layer, [...]: mapped from a file that has no name any more. Rows
            of padding repeat the last true one, as in Megatron's other formats."""
            info, spec = source.tensors[f"model.{names[0]}"], specs[names[0]]
            with open(path / "tensor", "wb") as stream:
                for name in names:
                    x = source.read(f"model.{name}")
                    if missing := (spec.padded_size or len(x)) - len(x):
                        x = torch.cat([x, x[-1:].expand(missing, *x.shape[1:])])
                    x.contiguous().view(-1).view(torch.uint8).numpy().tofile(stream)
            shape = ((len(names),) if theirs.startswith(LAYERS) else ()) + tuple(x.shape)
            mapped = torch.from_file(str(path / "tensor"), shared=False, size=len(names) * x.numel(), dtype=info.dtype)
            (path / "tensor").unlink()
            return mapped.view(shape)

        state: dict[str, Any] = {theirs: stacked(theirs, names) for theirs, names in stacks.items()}
        state |= {f"{LAYERS}{module}._extra_state/shard_{layer}_{model.num_layers}": io.BytesIO(none.getvalue())
                  for module in WITH_EXTRA_STATE for layer in range(model.num_layers)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is no process group
            save(state, storage_writer=FileSystemWriter(path), planner=Planner(flatten_state_dict=False), no_dist=True)
        torch.save({"args": arguments(source, model, layout, "megatron-core"), "checkpoint_version": 3.0,
                    "iteration": source.iteration, TRUE_VOCABULARY: source.facts["vocab_size"],
                    "content_metadata": {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}},
                   path / COMMON)
        (path / CONFIG).write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1,
                                               "common_backend": "torch", "common_backend_version": 1}))
        (folder / TRACKER).write_text(f"{source.iteration}")
    return Path(out) / path.name


def dist_name(name: str) -> str:
    """transformer.layers.3.input_layernorm.bias -> decoder.layers.self_attention.linear_qkv.layer_norm_bias."""
    theirs = core_name(name)
    if theirs.startswith(LAYERS):
        theirs = LAYERS + theirs.split(".", 3)[3]
    for plain, fused in FUSED.items():
        theirs = theirs.replace(f"{LAYERS}{plain}", f"{LAYERS}{fused}")
    return theirs
