"""Which program wrote a checkpoint, by the names of its files, so that training can refuse another program's.

`megatron/gpt2/formats/` reads those, for `tools/checkpoint.py`. The training program does not import it.
"""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from data_utils.command_line import how_to_call
from megatron.gpt2.checkpoint.folder import TRACKER
from megatron.gpt2.checkpoint.manifest import MANIFEST

# A format, and patterns of the files that all lie in the folder of its iteration. "megatron" is all versions.
SIGNS = (
    ("native", MANIFEST),
    ("torch_dist", ".metadata", "metadata.json"),
    ("dcp", ".metadata"),
    ("megatron", "mp_rank_*/model*rng.pt"),
    ("deepspeed", "mp_rank_*_model_states.pt"),
    ("huggingface", "config.json", "model.safetensors*"),
    ("huggingface", "config.json", "pytorch_model.bin*"),
    ("nanogpt", "ckpt.pt"),
)
OF_A_FOLDER = re.compile(r"model(_optim)?_rng\.pt|common\.pt|mp_rank_.*")  # files with the suffix of nanoGPT's


def recognise(path: str | Path, iteration: int | None = None) -> tuple[str, Path] | None:
    """The format of what lies at `path`, and the thing to open: an iteration's folder, or a file. No file is read.

    If a folder holds several iterations: `iteration`, else the tracker's, else the newest. None if nothing is known.
    """
    path = Path(path)
    if path.is_file() and path.suffix == ".pt" and not OF_A_FOLDER.fullmatch(path.name):
        return "nanogpt", path
    for folder in (path.parent, path.parent.parent) if path.is_file() else _iterations(path, iteration):
        for format, *patterns in SIGNS:
            if all(any(folder.glob(pattern)) for pattern in patterns):
                return format, folder / "ckpt.pt" if format == "nanogpt" else folder
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
    if iteration is None:
        found = [folder for folder in path.glob("iter_*") if re.fullmatch(r"iter_\d{7,12}", folder.name, re.ASCII)]
        yield from sorted(found, key=lambda folder: int(folder.name[5:]), reverse=True)


def refuse_foreign(load: str | Path, *, num_attention_heads: int | None = None, with_tokenizer: bool = False) -> None:
    """Another program's checkpoint is converted first, once: ValueError with the command.

    with_tokenizer: the result needs a tokenizer, because no flag will say which.
    """
    format, _ = recognise(load) or ("native", None)
    if format == "native":
        return
    may_lack_heads = format in ("megatron", "deepspeed", "dcp")
    flags = f" --num-attention-heads {num_attention_heads or 'N'}" if may_lack_heads else ""
    if with_tokenizer and format != "huggingface":
        flags += " --vocab-file FILE --merge-file FILE"
    folder = shlex.quote(str(load).rstrip("/"))
    raise ValueError(
        f"--load {load} is a checkpoint in the format {format}: {how_to_call('checkpoint')} convert "
        f"{folder} {folder}_native --to native{flags} converts it; then --load {folder}_native"
    )
