"""Megatron's `torch_dist` format, written by torch's own DCP writer: weights, Adam's state, schedule and arguments.

A tensor's layers are stacked, as Megatron keeps them. They wait on the disk, so that one of them is in memory. Adam's
state has the form `fully_reshardable`, which Megatron Core's distributed optimizer loads under every layout.
"""

import io
import json
from collections.abc import Callable
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
from megatron.gpt2.formats.write_dcp import save_folder
from megatron.gpt2.formats.write_megatron import MASTERS, arguments, core_name, has_optimizer, padded_model
from megatron.gpt2.formats.write_megatron_optimizer import grad_scaler, param_groups, schedule
from megatron.gpt2.model.parameters import parameter_specs
from megatron.gpt2.optimizer.optimizer import MOMENTS

FORM = "fully_reshardable"
# Transformer Engine's names, which Megatron Core's other layers take in this format too.
FUSED = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
# Modules whose state of FP8 the loader looks for, of each layer; it is none.
WITH_EXTRA_STATE = (
    "self_attention.linear_proj",
    "self_attention.linear_qkv",
    "self_attention.core_attention",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)
LAYERS = "decoder.layers."


def write_torch_dist(source: Source, out: str | Path, layout: Layout, *, log: Callable[[str], None] = print) -> Path:
    """Write `source`, with Adam's state where it holds one, into the new folder `out`; returns the iteration's folder.
    It loads under every layout; that of `layout` stands in the arguments. ValueError for one that Megatron Core does
    not have."""
    model = padded_model(source, layout.tensor)
    chunks_of_stages(model, layout, "megatron-core")  # checks the layout
    specs = parameter_specs(model, layout.tensor)
    stacks: dict[str, list[str]] = {}
    for name in specs:
        stacks.setdefault(dist_name(name), []).append(name)
    none = io.BytesIO()
    torch.save([None], none)
    prefixes = {"model": ""}
    top: dict[str, Any] = {
        "args": arguments(source, model, layout, "megatron-core"),
        "checkpoint_version": 3.0,
        "iteration": source.iteration,
        TRUE_VOCABULARY: source.facts["vocab_size"],
        "content_metadata": {"singleton_local_shards": False, "chained_optim_avoid_prefix": True},
    }
    if has_optimizer(source):
        prefixes |= {kind: f"optimizer.state.{'param' if kind == 'master' else kind}." for kind in MASTERS}
        top["args"].use_distributed_optimizer = True
        top["content_metadata"]["distrib_optim_sharding_type"] = FORM
        top["opt_param_scheduler"] = schedule(source, "megatron-v3", log)
        top["optimizer"] = {
            "optimizer": {"param_groups": param_groups(source)},
            "param_state_sharding_type": FORM,
            **grad_scaler(source),
        }
    with new_folder(out) as folder:
        path = folder / f"iter_{source.iteration:07d}"
        path.mkdir()

        def stacked(kind: str, theirs: str, names: list[str]) -> Tensor:
            """[layers, ...] or, of a parameter of no layer, [...]: mapped from a file that has no name any more. Rows
            of padding repeat the last true one, as in Megatron's other formats; their moments are zero."""
            info, spec = source.tensors[f"{kind}.{names[0]}"], specs[names[0]]
            with open(path / "tensor", "wb") as stream:
                for name in names:
                    x = source.read(f"{kind}.{name}")
                    if missing := (spec.padded_size or len(x)) - len(x):
                        last = torch.zeros_like(x[-1:]) if kind in MOMENTS else x[-1:]
                        x = torch.cat([x, last.expand(missing, *x.shape[1:])])
                    x.contiguous().view(-1).view(torch.uint8).numpy().tofile(stream)
            shape = ((len(names),) if theirs.startswith(LAYERS) else ()) + tuple(x.shape)
            mapped = torch.from_file(str(path / "tensor"), shared=False, size=len(names) * x.numel(), dtype=info.dtype)
            (path / "tensor").unlink()
            return mapped.view(shape)

        state: dict[str, Any] = {
            prefix + theirs: stacked(kind, theirs, names)
            for kind, prefix in prefixes.items()
            for theirs, names in stacks.items()
        }
        state |= {
            f"{LAYERS}{module}._extra_state/shard_{layer}_{model.num_layers}": io.BytesIO(none.getvalue())
            for module in WITH_EXTRA_STATE
            for layer in range(model.num_layers)
        }
        save_folder(path, state)
        torch.save(top, path / COMMON)
        (path / CONFIG).write_text(
            json.dumps(
                {
                    "sharded_backend": "torch_dist",
                    "sharded_backend_version": 1,
                    "common_backend": "torch",
                    "common_backend_version": 1,
                }
            )
        )
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
