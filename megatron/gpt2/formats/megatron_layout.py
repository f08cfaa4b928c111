"""How Megatron's files of a target layout split a model: which of our parameters each of them holds, under which name.

Legend: p pipeline stages, v chunks of layers per stage.
"""

from dataclasses import dataclass

from megatron.gpt2.config import ModelConfig, require
from megatron.gpt2.formats.megatron_files import HEAD
from megatron.gpt2.model.parameters import parameter_specs
from megatron.gpt2.pipeline.stages import FIRST, LAST, layers_of_stages, virtual_stages

PIPELINE, VIRTUAL = "--pipeline-model-parallel-size", "--num-layers-per-virtual-pipeline-stage"
WITH_PIPELINE = ("megatron-v2", "megatron-v3", "megatron-core")


@dataclass(frozen=True)
class Layout:
    """The ranks that files are written for. first, last: layers of the first and the last stage, where they differ from
    the others'. virtual_layers: layers of a chunk, where stages are interleaved."""

    tensor: int = 1
    pipeline: int = 1
    virtual_layers: int | None = None
    first: int | None = None
    last: int | None = None

    def virtual(self, num_layers: int) -> int:
        """Chunks of layers per stage, v. ValueError that names the flag."""
        if self.virtual_layers is None:
            return 1
        return virtual_stages(num_layers, self.pipeline, self.virtual_layers)


def chunks_of_stages(model: ModelConfig, layout: Layout, format: str) -> list[list[dict[str, str]]]:
    """Stage by stage its chunks of the layers: each {its name in the file, in 2019's spelling: our parameter}.

    Layers are numbered from 0 in every chunk. The last stage of several holds the tied matrix as well, as `HEAD`.
    ValueError, which names the flag, for a layout that the format's Megatron cannot load.
    """
    p, v = layout.pipeline, layout.virtual(model.num_layers)
    _check(model.num_layers, layout, format)
    layers = layers_of_stages(model.num_layers, p, v, layout.first, layout.last)
    sizes = [len(chunk) for chunk in layers]
    middle = {
        sizes[chunk]
        for chunk in range(p * v)
        if not (chunk % p == 0 and layout.first is not None or chunk % p == p - 1 and layout.last is not None)
    }
    if len(middle) > 1 or any(len(set(sizes[stage::p])) > 1 for stage in range(p)):
        raise ValueError(
            f"{PIPELINE} {p}{f' with {v} chunks of layers each ({VIRTUAL})' if v > 1 else ''} does not "
            f"divide the {model.num_layers} layers, and Megatron asks for that"
            + (f": {FIRST} and {LAST} set some apart" if format == "megatron-core" else "")
        )
    chunks: list[dict[str, str]] = [{} for _ in layers]
    for name in parameter_specs(model):
        words = name.split(".")
        if words[1] == "layers":
            number = int(words[2])
            chunk = next(chunk for chunk, held in enumerate(layers) if number in held)
            words[2] = str(number - layers[chunk].start)
            chunks[chunk][".".join(words)] = name
        else:
            chunks[-1 if words[0] == "transformer" else 0][name] = name
    if p > 1:
        chunks[-1][HEAD] = "word_embeddings.weight"
    return [chunks[stage::p] for stage in range(p)]


def _check(num_layers: int, layout: Layout, format: str) -> None:
    """ValueError, which names the flag, for what the format's Megatron does not have."""
    p, v = layout.pipeline, layout.virtual(num_layers)
    require(p > 0, f"{PIPELINE} must be positive, not {p}")
    require(
        p == 1 or format in WITH_PIPELINE,
        f"{PIPELINE} {p}: {format} has no pipeline; {', '.join(WITH_PIPELINE)} have one",
    )
    require(
        v == 1 or p > (1 if format == "megatron-core" else 2),
        f"{VIRTUAL} needs {PIPELINE} of at least {2 if format == 'megatron-core' else 3} in {format}",
    )
    for flag, given in ((FIRST, layout.first), (LAST, layout.last)):
        require(
            given is None or format == "megatron-core",
            f"{flag}: the stages of {format} all hold as many layers; megatron-core has this flag",
        )
