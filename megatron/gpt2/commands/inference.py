"""Programs that use a trained model share this code: flags, loading of the model, and the JSON file of scores."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import mpu
from data_utils.command_line import Log, Parser, plural, positive_int, require
from data_utils.files import atomic_write_text
from megatron.gpt2.config import PRECISION_CHOICES, LaunchConfig, ParallelConfig, flag_name
from megatron.gpt2.config.arguments import Arguments, parse
from megatron.gpt2.config.flags import add_section, with_dashes
from megatron.gpt2.device import PRECISIONS, choose_backend, choose_device, choose_precision, set_threads
from megatron.gpt2.dist.ranks import RankInfo
from megatron.gpt2.dist.rendezvous import initialize_distributed
from megatron.gpt2.generate.load_model import LoadedModel, load_for_inference


class ModelParser(Parser):
    """The parser of a program that uses a trained model, with the flags for the model, the device and the layout.

    scores: True for a program that scores texts. Its data-parallel ranks share the texts, and its default precision
        does not depend on the device. In a program that generates text, all ranks together hold one model.
    """

    def __init__(self, doc: str | None, *, scores: bool) -> None:
        super().__init__(description=doc)
        self.set_defaults(scores=scores)
        self.add_argument("--load", required=True, metavar="DIR", help="the --save folder of a training run")
        self.add_argument(
            "--tensor-model-parallel-size",
            "--model-parallel-size",
            type=positive_int,
            metavar="N",
            default=1 if scores else None,
            help=f"ranks that share each layer; may differ from the checkpoint's (default: {1 if scores else 'all'})",
        )
        self.add_argument(
            "--pipeline-model-parallel-size",
            type=positive_int,
            metavar="N",
            default=1,
            help="ranks that hold successive layers (default: 1)",
        )
        self.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
        precision = "fp32" if scores else "auto"
        self.add_argument("--precision", default=precision, choices=PRECISION_CHOICES, help=f"default: {precision}")
        for name, meant in (("fp16", "fp16-on-gpu"), ("bf16", "bf16")):
            self.add_argument(f"--{name}", dest="precision", action="store_const", const=meant, help=argparse.SUPPRESS)
        self.add_argument("--distributed-backend", choices=("nccl", "gloo"), help="default: by the device")
        add_section(self, "launch", LaunchConfig)  # `run_program` has read these flags.
        if scores:
            self.add_argument(
                *("--micro-batch-size", "--batch-size", "--eval-batch-size", "--eval-micro-batch-size"),
                type=positive_int,
                default=4,
                metavar="N",
                help="texts computed together (default: 4)",
            )
            self.add_argument("--output", metavar="FILE", help="write the result there, as JSON")

    def parse_with_training_flags(self, argv: Sequence[str], log: Log) -> tuple[argparse.Namespace, Arguments]:
        """Parse the flags of an inference program, and flags of training, which Megatron's command lines contain. `log`
        gets a notice that names the training flags. Raises ValueError if a flag is unknown or invalid."""
        args, rest = self.parse_known_args([with_dashes(word) for word in argv])
        training = parse(rest)
        if training.given:
            log(f"notice: {', '.join(sorted(map(flag_name, training.given)))}: not needed here")
        for note in training.notes:
            log(f"notice: {note}")
        return args, training


def open_model_from_flags(args: argparse.Namespace, rank_info: RankInfo, log: Log) -> LoadedModel:
    """Make the process group and the groups of mpu, and load the model that the flags of `ModelParser` name.

    Every rank must call this function. Raises the errors of `load_for_inference`, and ValueError for an invalid device
    or layout.
    """
    world_size, stages = rank_info.world_size, args.pipeline_model_parallel_size
    size = args.tensor_model_parallel_size or world_size // stages or 1
    require(
        world_size % (size * stages) == 0 if args.scores else world_size == size * stages,
        f"--tensor-model-parallel-size {size} × --pipeline-model-parallel-size {stages} does not fit the "
        f"{plural(world_size, 'rank')}: omit --tensor-model-parallel-size; --nproc-per-node starts ranks",
    )
    set_threads(rank_info)
    device, why = choose_device(args.device, rank_info)
    dtype, why_dtype = choose_precision(args.precision, device)
    for reason in (why, why_dtype):
        if reason.startswith(("WARNING", "notice")):
            log(reason)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend, _ = choose_backend(args.distributed_backend, device)
    initialize_distributed(rank_info, backend, device, ParallelConfig().distributed_timeout_minutes)
    mpu.initialize_model_parallel(size, stages)
    return load_for_inference(args.load, device, dtype, log=log)


def check_output(args: argparse.Namespace) -> None:
    """Raise FileNotFoundError if the folder of --output does not exist."""
    if args.output is not None and not Path(args.output).absolute().parent.is_dir():
        raise FileNotFoundError(f"--output {args.output}: its folder does not exist")


def score_metadata(loaded: LoadedModel, micro_batch_size: int) -> dict[str, Any]:
    """Return the settings on which every score depends."""
    checkpoint, tokenizer = loaded.checkpoint, loaded.tokenizer
    return {
        "checkpoint": str(checkpoint.path),
        "iteration": checkpoint.iteration,
        "manifest_sha256": checkpoint.manifest_sha256,  # The hash covers every file of the checkpoint.
        "tokenizer": tokenizer.kind,
        "tokenizer_fingerprint": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
        "precision": PRECISIONS[loaded.dtype],
        "device": loaded.device.type,
        "model_parallel_size": mpu.get_model_parallel_world_size(),
        "data_parallel_size": mpu.get_data_parallel_world_size(),
        "micro_batch_size": micro_batch_size,
        "torch": torch.__version__,
    }


def write_scores(path: str | None, value: dict[str, Any]) -> None:
    """Write `value` as JSON to `path` atomically, unless `path` is None. Infinities and NaN, which JSON lacks, become
    null."""
    if path is not None:
        finite = json.loads(json.dumps(value), parse_constant=lambda name: None)
        atomic_write_text(path, json.dumps(finite, indent=1, allow_nan=False) + "\n")
