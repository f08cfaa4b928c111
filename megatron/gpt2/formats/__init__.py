"""Checkpoints of other programs, read as ours and written for them."""

import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

from data_utils.command_line import how_to_call
from megatron.gpt2.checkpoint.folder import TRACKER, find_checkpoint
from megatron.gpt2.checkpoint.manifest import MANIFEST
from megatron.gpt2.checkpoint.reader import Checkpoint
from megatron.gpt2.checkpoint.source import Source
from megatron.gpt2.formats import dcp_gpt2, huggingface, megatron, megatron_dist, nanogpt
from megatron.gpt2.formats.dcp_metadata import METADATA
from megatron.gpt2.formats.foreign import Hints
from megatron.gpt2.formats.megatron_files import RANK_FILES, rank_files

__all__ = ["FORMATS", "Hints", "Source", "open_source", "recognise", "refuse_foreign"]

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
    """The format of what lies at `path`, and the thing to open: an iteration's folder, or a file. No tensor is read.

    Of a folder with several iterations: `iteration`, else the tracker's, else the newest. None where nothing is known.
    ValueError where the file that tells Megatron's versions apart cannot be read.
    """
    path = Path(path)
    if path.is_file():
        if path.name in (MANIFEST, "config.json") or path.suffix == ".safetensors" or path.name.startswith("mp_rank_"):
            return recognise(path.parent)
        if path.name in RANK_FILES:
            return recognise(path.parent.parent)
        if path.name in (METADATA, megatron_dist.COMMON, megatron_dist.CONFIG) or path.suffix == ".distcp":
            return recognise(path.parent)
        return ("nanogpt", path) if path.suffix == ".pt" else None
    for folder in _iterations(path, iteration):
        if (folder / MANIFEST).is_file():
            return "native", folder
        if (folder / METADATA).is_file():
            return "torch_dist" if (folder / megatron_dist.CONFIG).is_file() else "dcp", folder
        if files := rank_files(folder):
            return megatron.version(files), folder
        if huggingface.weights_file(folder):
            return "huggingface", folder
        if (folder / "ckpt.pt").is_file():
            return "nanogpt", folder / "ckpt.pt"
    return None


def _iterations(path: Path, iteration: int | None) -> Iterator[Path]:
    """`path` itself, and the folders inside of it that may hold the iteration, the likeliest first."""
    yield path
    names = []
    for tracker in (TRACKER, "latest"):  # Megatron's and ours; DeepSpeed's
        if (path / tracker).is_file():
            with open(path / tracker, "rb") as stream:
                names.append(stream.read(80).decode("ascii", "replace").strip())
    if iteration is not None:
        names = [str(iteration), f"global_step{iteration}"]
    for name in names:
        if re.fullmatch(r"\w[\w.-]*", name, re.ASCII):  # no way out of the folder
            yield from (path / f"iter_{int(name):07d}", path / name) if name.isdigit() else (path / name,)
    if iteration is None and path.is_dir():
        yield from sorted(
            (p for p in path.glob("iter_*") if re.fullmatch(r"iter_\d{7,12}", p.name)),
            key=lambda p: int(p.name[5:]),
            reverse=True,
        )


def refuse_foreign(load: str | Path, *, num_attention_heads: int | None = None, with_tokenizer: bool = False) -> None:
    """Another program's checkpoint is converted first, once: ValueError with the command.

    with_tokenizer: it has to bring its tokenizer along, since no flag will say which.
    """
    format, _ = recognise(load) or ("native", None)
    if format == "native":
        return
    without_heads = format in ("megatron-2019", "deepspeed", "dcp")
    flags = f" --num-attention-heads {num_attention_heads or 'N'}" if without_heads else ""
    if with_tokenizer and format != "huggingface":
        flags += " --vocab-file FILE --merge-file FILE"
    folder = shlex.quote(str(load).rstrip("/"))
    raise ValueError(
        f"--load {load} is a checkpoint in the format {format}: {how_to_call('checkpoint')} convert "
        f"{folder} {folder}_native --to native{flags} converts it; then --load {folder}_native"
    )


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
