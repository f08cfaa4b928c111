"""Which operation of a step made a tensor, in the words of mpu's layers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from megatron.gpt2.extensions.verify.parts import Key
from megatron.gpt2.model.gpt2 import TIED

# Of a row-parallel layer: what its output is the sum of.
ROW_PARALLEL = ("attention.dense", "mlp.dense_4h_to_h")
MODULES = {
    "input_layernorm": "the layer norm {module}",
    "post_attention_layernorm": "the layer norm {module}",
    "attention.query_key_value": "the product of {module}",
    "attention.core": "attention of {layer}: softmax(QKᵀ/√d)V, or its dropout",
    "mlp.dense_h_to_4h": "the product of {module}",
    "mlp.gelu": "GELU of {layer}",
}
NUMBERS = {
    "loss": "the head and the cross-entropy, and the sum of the samples over micro-batches and data-parallel ranks",
    "gradient norm": "the sum of the squares of all gradients, each of which counts once",
    "skipped": "the test whether the gradient norm is finite",
    "learning rate": "the schedule of the learning rate",
    "steps of the optimizer": "the count of steps in AdamW",
    "samples": "the data loader: which samples of the run are this rank's",
    "tokens": "the data loader: the order of samples, and which of them are this rank's",
    "labels": "the data loader: the order of samples, and which of them are this rank's",
}


def operation(key: Key, facts: Mapping[str, Any]) -> str:
    """What made the tensor `key` in a run with these `facts` of its layout."""
    if key.name in NUMBERS:
        return NUMBERS[key.name]
    p, dp = facts["model_parallel_size"], facts["data_parallel_size"]
    parallel = facts["config"]["parallel"]
    sequence = parallel["sequence_parallel"] and p > 1
    total = "reduce-scatter" if sequence else "all-reduce"
    if key.kind == "activation":
        return _forward(key.name, p, sequence, total) + ", forward"
    if key.kind == "activation gradient":
        return _backward(key.name.removeprefix("gradient of "), p, total) + ", backward"
    name = key.name.split(" of ")[-1]
    sharded = parallel["use_distributed_optimizer"] and dp > 1
    if key.kind == "gradient":
        sums = [f"over {facts['micro_batches']} micro-batches"] * (facts["micro_batches"] > 1)
        sums += [
            f"over {dp} data-parallel ranks by the {'reduce-scatter' if sharded else 'all-reduce'} of its bucket"
        ] * (dp > 1)
        sums += [f"over {p} model-parallel ranks, since each has a part of the sequence"] * (
            sequence
            and (
                "layernorm" in name
                or "position_embeddings" in name
                or name.endswith(tuple(f"{layer}.bias" for layer in ROW_PARALLEL))
            )
        )
        sums += ["over the first and the last stage of the pipeline"] * (
            facts.get("pipeline_parallel_size", 1) > 1 and name == TIED
        )
        return f"the gradient of {_module(name)} in backward" + (", and its sum " if sums else "") + " and ".join(sums)
    if key.step == 0:
        return f"the initialisation of {_module(name)}, or its part of the checkpoint"
    if key.kind == "moment":
        return f"AdamW's update of its moments of {_module(name)}: the gradient after clipping"
    gathered = (
        f", or the all-gather that brings it to the other {dp - 1} data-parallel ranks"
        if (sharded and key.kind == "parameter")
        else ""
    )
    return f"AdamW's update of {_module(name)}{gathered}"


def _forward(name: str, p: int, sequence: bool, total: str) -> str:
    if name == "embeddings":
        summed = f"the {total} of the word embeddings" if p > 1 else "the word embeddings"
        return f"{summed}, or the position embeddings that are added to it, or dropout"
    layer, module = _layer(name)
    if module in ROW_PARALLEL:
        return f"the {total if p > 1 else 'product'} of {_module(name)}, with its bias"
    if module in MODULES:
        gathered = (
            ", or the all-gather of its input"
            if sequence and module in ("attention.query_key_value", "mlp.dense_h_to_4h")
            else ""
        )
        return MODULES[module].format(module=_module(name), layer=layer) + gathered
    return f"the residual sum at the end of {layer}, or dropout" if layer else f"the layer norm {_module(name)}"


def _backward(name: str, p: int, total: str) -> str:
    of_input = {"input_layernorm": "attention.query_key_value", "post_attention_layernorm": "mlp.dense_h_to_4h"}
    layer, module = _layer(name)
    if module in of_input:
        reader = f"{layer}'s {of_input[module]}"
        return f"the {total} of the gradient of the input of {reader}" if p > 1 else f"the product of {reader}"
    if name == "transformer.final_layernorm":
        return "the gradient of the cross-entropy and the head" + (f", and its {total}" if p > 1 else "")
    if layer:
        return f"what follows {layer}: the layer norms and residual sums behind it"
    return "the layer norms and residual sums behind the embeddings"


def _layer(name: str) -> tuple[str, str]:
    """ "transformer.layers.3.attention.dense" -> ("layer 3", "attention.dense")."""
    found = re.match(r"transformer\.layers\.(\d+)(?:\.(.+))?", name)
    return (f"layer {found[1]}", found[2] or "") if found else ("", "")


def _module(name: str) -> str:
    layer, module = _layer(name)
    return f"{layer}'s {module}" if layer else name.removeprefix("transformer.")
