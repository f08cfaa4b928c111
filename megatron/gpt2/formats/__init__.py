"""Read the checkpoints of other programs, and write checkpoints for them."""

from functools import partial
from pathlib import Path

from data_utils.command_line import Log
from megatron.gpt2.checkpoint.interface import BaseCheckpoint
from megatron.gpt2.checkpoint.reader import NativeCheckpoint
from megatron.gpt2.checkpoint.save_folder import detect_format_by_file_names, find_checkpoint
from megatron.gpt2.formats import huggingface, megatron, nanogpt_and_dcp, torch_dist
from megatron.gpt2.formats.foreign_checkpoint import Hints, file_errors

__all__ = ["FORMATS", "Hints", "BaseCheckpoint", "open_checkpoint", "recognise"]

# megatron-2019 has a flat state dict (also NVIDIA's release and DeepSpeedExamples); v1 to v3 have nested state dicts.
# megatron-core and torch_dist are --ckpt-format torch and torch_dist of today's Megatron-LM.
OF_RANKS = ("megatron-2019", "megatron-v1", "megatron-v2", "megatron-v3", "megatron-core", "deepspeed")
OPENERS = {
    "huggingface": huggingface.open_huggingface,
    "torch_dist": torch_dist.open_torch_dist,
    "nanogpt": nanogpt_and_dcp.open_nanogpt,
    "dcp": nanogpt_and_dcp.open_dcp,
}
FORMATS = ("native", *OF_RANKS, *OPENERS)


def detect_format(path: str | Path, iteration: int | None = None) -> tuple[str, Path] | None:
    """Return the format and the path of a checkpoint, as `detect_format_by_file_names`. Megatron's versions are
    distinguished by the contents of the files. No tensor is read. Raises ValueError if a file cannot be read."""
    format_and_path = detect_format_by_file_names(path, iteration)
    if format_and_path is None or format_and_path[0] not in ("megatron", "deepspeed"):
        return format_and_path
    files = megatron.rank_files(format_and_path[1])
    return (megatron.detect_megatron_format(files[min(files)]), format_and_path[1]) if files else None


def open_checkpoint(path: str | Path, hints: Hints | None = None, *, log: Log = print) -> BaseCheckpoint:
    """Open the checkpoint at `path`, of any format: a folder of iterations, one iteration, or a file.

    hints: values for files that do not contain them.
    log: gets a line for each value that is only a guess.

    Raises ValueError, in one line, if the checkpoint is not valid.
    """
    path, hints = Path(path), hints or Hints()
    format_and_path = detect_format(path, hints.iteration)
    if format_and_path is None:
        of_iteration = "" if hints.iteration is None else f" of iteration {hints.iteration}"
        problem = f"holds no checkpoint{of_iteration} in a known format" if path.exists() else "does not exist"
        raise ValueError(f"{path}: {problem}; the formats are {', '.join(FORMATS)}")
    format, location = format_and_path
    if format == "native":
        source = _open_native(path, location, hints, log)
    else:
        opener = OPENERS.get(format) or partial(megatron.open_megatron, format=format)
        with file_errors(location):
            source = opener(location, hints=hints, log=lambda line: log(f"{location}: {line}"))
    model = source.metadata["config"]["model"]
    for flag, value, saved in (
        ("--num-attention-heads", hints.num_attention_heads, model.get("num_attention_heads")),
        ("--vocab-size", hints.vocab_size, source.metadata["vocab_size"]),
        ("--gelu", hints.gelu, model.get("gelu")),
        ("--iteration", hints.iteration, source.iteration),
    ):
        if value is not None and value != saved:
            raise ValueError(f"{source.path}: {flag} {value}, but the checkpoint has {saved}: leave out the flag")
    return source


def _open_native(path: Path, location: Path, hints: Hints, log: Log) -> BaseCheckpoint:
    if hints.iteration is None and location != path and path.is_dir():
        # `find_checkpoint` skips damaged checkpoints with a warning.
        checkpoint = find_checkpoint(path, log=log, verify=False)
        if checkpoint is not None:
            return checkpoint
    checkpoint = NativeCheckpoint(location)
    if problem := checkpoint.find_damage(check_hashes=False):
        raise ValueError(problem)
    return checkpoint
