"""Checkpoints of other programs, read as ours and written for them."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from megatron.gpt2.checkpoint.folder import find_checkpoint
from megatron.gpt2.checkpoint.folder import recognise as by_name
from megatron.gpt2.checkpoint.reader import Checkpoint
from megatron.gpt2.checkpoint.source import Source
from megatron.gpt2.formats import huggingface, megatron, openai, torch_dist
from megatron.gpt2.formats.foreign import Hints, errors_named

__all__ = ["FORMATS", "Hints", "Source", "open_source", "recognise"]

# megatron-2019 is flat (NVIDIA's release and DeepSpeedExamples' too), v1 to v3 are nested, megatron-core and torch_dist
# are today's --ckpt-format torch and torch_dist.
OF_RANKS = ("megatron-2019", "megatron-v1", "megatron-v2", "megatron-v3", "megatron-core", "deepspeed")
OPENERS = {
    "huggingface": huggingface.open_huggingface,
    "torch_dist": torch_dist.open_torch_dist,
    "nanogpt": openai.open_nanogpt,
    "dcp": openai.open_dcp,
}
FORMATS = ("native", *OF_RANKS, *OPENERS)


def recognise(path: str | Path, iteration: int | None = None) -> tuple[str, Path] | None:
    """As `checkpoint.folder.recognise`, with Megatron's version, which its files say. No tensor is read. ValueError if
    such a file cannot be read."""
    found = by_name(path, iteration)
    if found is None or found[0] not in ("megatron", "deepspeed"):
        return found
    files = megatron.rank_files(found[1])
    return (megatron.version(files[min(files)]), found[1]) if files else None


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
    if format == "native":
        source = _open_native(path, where, hints, log)
    else:
        opener = OPENERS.get(format) or partial(megatron.open_megatron, format=format)
        with errors_named(where):
            source = opener(where, hints=hints, log=lambda line: log(f"{where}: {line}"))
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


def _open_native(path: Path, where: Path, hints: Hints, log: Callable[[str], None]) -> Source:
    if hints.iteration is None and where != path and path.is_dir():
        checkpoint = find_checkpoint(path, log=log, verify=False)  # steps over a damaged one, loudly
        if checkpoint is not None:
            return checkpoint
    checkpoint = Checkpoint(where)
    if problem := checkpoint.damage(hashed=False):
        raise ValueError(problem)
    return checkpoint
