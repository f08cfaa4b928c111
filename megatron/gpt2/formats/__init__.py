"""Checkpoints of other programs, read as ours and written for them."""

from collections.abc import Callable
from pathlib import Path

from megatron.gpt2.checkpoint.folder import find_checkpoint
from megatron.gpt2.checkpoint.foreign import recognise as by_name
from megatron.gpt2.checkpoint.reader import Checkpoint
from megatron.gpt2.checkpoint.source import Source
from megatron.gpt2.formats import dcp_gpt2, huggingface, megatron, megatron_dist, nanogpt
from megatron.gpt2.formats.foreign import Hints
from megatron.gpt2.formats.megatron_files import rank_files

__all__ = ["FORMATS", "Hints", "Source", "open_source", "recognise"]

# megatron-2019 is flat (NVIDIA's release and DeepSpeedExamples' too), v1 to v3 are nested, megatron-core and torch_dist
# are today's --ckpt-format torch and torch_dist.
FORMATS = (
    "native",
    "huggingface",
    "megatron-2019",
    "megatron-v1",
    "megatron-v2",
    "megatron-v3",
    "megatron-core",
    "torch_dist",
    "deepspeed",
    "nanogpt",
    "dcp",
)


def recognise(path: str | Path, iteration: int | None = None) -> tuple[str, Path] | None:
    """As `checkpoint.foreign.recognise`, with Megatron's version, which its files say. No tensor is read. ValueError if
    such a file cannot be read."""
    found = by_name(path, iteration)
    if found is None or found[0] not in ("megatron", "deepspeed"):
        return found
    return megatron.version(rank_files(found[1])), found[1]


def open_source(path: str | Path, hints: Hints | None = None, *, log: Callable[[str], None] = print) -> Source:
    """Open the checkpoint at `path`, of whatever format: a folder of iterations, one iteration, or a file.

    `hints` says what the source may not; `log` gets a line for each fact that was concluded from something else.
    ValueError, one line, for anything that is not right.
    """
    path, hints = Path(path), hints or Hints()
    found = recognise(path, hints.iteration)
    if found is None:
        wanted = "" if hints.iteration is None else f" of iteration {hints.iteration}"
        problem = f"holds no checkpoint{wanted} that is known here" if path.exists() else "does not exist"
        raise ValueError(f"{path}: {problem}; the formats are {', '.join(FORMATS)}")
    format, where = found
    source: Source
    if format == "native":
        checkpoint = None
        if hints.iteration is None and where != path and path.is_dir():
            checkpoint = find_checkpoint(path, log=log, verify=False)  # steps over a damaged one, loudly
        if checkpoint is None:
            checkpoint = Checkpoint(where)
            if problem := checkpoint.damage(hashed=False):
                raise ValueError(problem)
        source = checkpoint
    elif format == "huggingface":
        source = huggingface.open_huggingface(where, hints)
    elif format == "torch_dist":
        source = megatron_dist.open_torch_dist(where, hints, log=log)
    elif format == "dcp":
        source = dcp_gpt2.open_dcp(where, hints, log=log)
    elif format == "nanogpt":
        source = nanogpt.open_nanogpt(where, hints, log=log)
    else:
        source = megatron.open_megatron(where, format, hints, log=log)
    model = source.facts["config"]["model"]
    for flag, asked, said in (
        ("--num-attention-heads", hints.num_attention_heads, model.get("num_attention_heads")),
        ("--vocab-size", hints.vocab_size, source.facts["vocab_size"]),
        ("--gelu", hints.gelu, model.get("gelu")),
        ("--iteration", hints.iteration, source.iteration),
    ):
        if asked is not None and asked != said:
            raise ValueError(f"{source.path}: {flag} {asked} is not the {said} that the checkpoint says: leave it out")
    return source
