"""The shape of a GPT-2 in a Megatron checkpoint: from its tensors, its arguments and what the user says.

Legend: h hidden, n heads, p ranks over which the tensors are split.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron.gpt2.config import ModelConfig, require
from megatron.gpt2.formats.foreign import GPT2_VOCABULARY, TRUE_VOCABULARY, Hints, short_repr
from megatron.gpt2.formats.megatron_files import attributes

# Arguments that change the formula, and are absent, None or False in a GPT-2.
OTHER_MODELS = (
    "apply_residual_connection_post_layernorm",
    "swiglu",
    "squared_relu",
    "quick_geglu",
    "apply_layernorm_1p",
    "untie_embeddings_and_output_weights",
    "num_experts",
    "multi_latent_attention",
    "qk_layernorm",
)


def model_of(
    path: Path,
    top: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    hints: Hints,
    found: Mapping[str, int],
    p: int,
) -> tuple[ModelConfig, int]:
    """The shape, its vocabulary true as far as that is known, and the padded vocabulary.

    top: what stands beside the weights, "args" among it. shapes: by our names, as one of p ranks has them. found: what
    the files say of some arguments, "num_layers" among them. ValueError, one line, where they contradict each other.
    """
    args = attributes(top.get("args"))
    for name in OTHER_MODELS:
        require(not args.get(name), f"{path}: was trained with {name}, which this program's GPT-2 does not compute")

    def shape(name: str, dimensions: int) -> tuple[int, ...]:
        if len(shapes.get(name, ())) != dimensions:
            raise ValueError(f"{path}: holds no {name}: is a pipeline stage missing, or is it no GPT-2?")
        return shapes[name]

    rows, h = shape("word_embeddings.weight", 2)
    positions, _ = shape("position_embeddings.weight", 2)
    qkv_rows, _ = shape("transformer.layers.0.attention.query_key_value.weight", 2)
    ffn, _ = shape("transformer.layers.0.mlp.dense_h_to_4h.weight", 2)
    if qkv_rows * p != 3 * h:
        some = f"{3 * h // qkv_rows} ranks" if qkv_rows and 3 * h % qkv_rows == 0 else "another number of ranks"
        raise ValueError(f"{path}: was written by {some}, and the files of {p} are here: is one missing?")
    for name, held in {**found, "hidden_size": h, "padded_vocab_size": rows * p}.items():
        if isinstance(args.get(name), int) and args[name] != held:
            raise ValueError(
                f"{path}: {name} is {args[name]} by its arguments and {held} by its files: are two runs mixed?"
            )
    true = top.get(TRUE_VOCABULARY)
    if true is not None and not (type(true) is int and 0 < true <= rows * p):
        raise ValueError(
            f"{path}: {TRUE_VOCABULARY} is {short_repr(true)}, and it holds {rows * p} rows, padding included"
        )
    vocab_size = true or hints.vocab_size or rows * p
    if vocab_size > rows * p:
        raise ValueError(
            f"{path}: --vocab-size {vocab_size} is more than the {rows * p} rows that it holds, padding included"
        )
    said: dict[str, Any] = {
        name: float(args[name])
        for name in ("attention_dropout", "hidden_dropout", "layernorm_epsilon", "init_method_std")
        if type(args.get(name)) in (int, float)
    }
    if type(args.get("norm_epsilon")) is float:  # its name since 2023
        said["layernorm_epsilon"] = args["norm_epsilon"]
    divisor = args.get("make_vocab_size_divisible_by")
    if true is None and hints.vocab_size is None:
        said["make_vocab_size_divisible_by"] = 1  # padded already
    elif type(divisor) is int and divisor > 0:
        said["make_vocab_size_divisible_by"] = divisor
    heads = heads_of(path, h, p, args, hints)
    try:
        return ModelConfig(
            num_layers=found["num_layers"],
            hidden_size=h,
            num_attention_heads=heads,
            ffn_hidden_size=None if ffn * p == 4 * h else ffn * p,
            max_position_embeddings=positions,
            vocab_size=vocab_size,
            gelu=hints.gelu or _gelu(args),
            **said,
        ), rows * p
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def with_padding(model: ModelConfig, padded: int) -> ModelConfig:
    """The shape, with the rows of padding as if they were of the vocabulary."""
    return dataclasses.replace(model, vocab_size=padded, make_vocab_size_divisible_by=1)


def tell_of_padding(
    path: Path,
    top: Mapping[str, Any],
    model: ModelConfig,
    padded: int,
    hints: Hints,
    p: int,
    log: Callable[[str], None],
) -> None:
    """A line where the vocabulary is only taken to be its padded size. p: ranks for which it was padded."""
    if model.vocab_size == padded and hints.vocab_size is None and TRUE_VOCABULARY not in top:
        guesses = [
            f"{size} ({whose})"
            for size, whose in (
                (GPT2_VOCABULARY, "GPT-2's"),
                (attributes(top.get("args")).get("vocab_size"), "its arguments'"),
            )
            if type(size) is int and 0 < padded - size <= 128 * p
        ]
        log(
            f"{path}: the vocabulary is taken to be its padded size, {padded}: --vocab-size "
            f"{' or '.join(guesses) or 'N'} leaves out the rows that are padding"
        )


def heads_of(path: Path, h: int, p: int, args: Mapping[str, Any], hints: Hints) -> int:
    """The number of heads that the arguments or the user say. ValueError, with those that fit, for another one."""
    said = args.get("num_attention_heads")
    heads = said if isinstance(said, int) else hints.num_attention_heads
    fitting = sorted((n for n in range(p, h + 1, p) if h % n == 0), key=lambda n: abs(math.log2(h / n / 64)))
    if heads is None or heads not in fitting:
        problem = (
            "does not say how many attention heads it has"
            if heads is None
            else f"{heads} attention heads do not divide its hidden size of {h} over {p} ranks"
        )
        raise ValueError(
            f"{path}: {problem}: give --num-attention-heads, likeliest first one of {', '.join(map(str, fitting[:6]))}"
        )
    return heads


def _gelu(args: Mapping[str, Any]) -> str:
    """2019 knew the tanh form alone, as the fused kernel does; without it later versions compute erf's."""
    if "openai_gelu" not in args or args["openai_gelu"] or args.get("bias_gelu_fusion"):
        return "tanh"
    return "erf"
