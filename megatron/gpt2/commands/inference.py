"""What the programs around a trained model share: their flags, how they load the model, and the JSON file of scores."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import mpu
from data_utils.command_line import Parser
from data_utils.files import replace_text
from megatron.gpt2.config import PRECISION_CHOICES, LaunchConfig, ParallelConfig, flag, require
from megatron.gpt2.config.arguments import Arguments, parse
from megatron.gpt2.config.flags import add_section, dashed
from megatron.gpt2.device import PRECISIONS, choose_backend, choose_device, choose_precision, set_threads
from megatron.gpt2.dist.ranks import Ranks
from megatron.gpt2.dist.rendezvous import initialize_distributed
from megatron.gpt2.dist.run_program import Log
from megatron.gpt2.generate.load_model import LoadedModel, load_for_inference


class ModelParser(Parser):
    """The parser of a program that uses a trained model: it knows the flags for the model and for where it runs.

    precision: the default of --precision. model_parallel_size: the default of --model-parallel-size. None: all ranks
    that --pipeline-model-parallel-size leaves, see `check_shared`.
    """

    def __init__(self, doc: str | None, *, precision: str, model_parallel_size: int | None = 1) -> None:
        super().__init__(description=doc)
        self.add_argument("--load", required=True, metavar="DIR", help="the --save folder of a training run")
        self.add_argument(
            "--model-parallel-size",
            "--tensor-model-parallel-size",
            type=int,
            metavar="N",
            default=model_parallel_size,
            help="ranks that share each layer, whatever the checkpoint's were (default: "
            f"{model_parallel_size or 'all'})",
        )
        self.add_argument(
            "--pipeline-model-parallel-size",
            type=int,
            metavar="N",
            default=1,
            help="ranks that hold successive layers (default: 1)",
        )
        self.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
        self.add_argument("--precision", default=precision, choices=PRECISION_CHOICES, help=f"default: {precision}")
        for name, meant in (("fp16", "fp16-on-gpu"), ("bf16", "bf16")):
            self.add_argument(f"--{name}", dest="precision", action="store_const", const=meant, help=argparse.SUPPRESS)
        self.add_argument("--distributed-backend", choices=("nccl", "gloo"), help="default: by the device")
        add_section(self, "launch", LaunchConfig)  # `run_program` has read them

    def add_scores(self, *batch_names: str) -> None:
        """The flags of a program that scores texts; `check_scores` checks them. batch_names: more for the batch."""
        self.add_argument(
            "--micro-batch-size",
            "--batch-size",
            *batch_names,
            type=int,
            default=4,
            metavar="N",
            help="texts computed together (default: 4)",
        )
        self.add_argument("--output", metavar="FILE", help="write the result there, as JSON")

    def parse_with_training_flags(self, argv: Sequence[str], log: Log) -> tuple[argparse.Namespace, Arguments]:
        """The flags of this program, and those that training knows, which Megatron's command lines have here too: `log`
        gets a notice of them. ValueError if one is unknown or cannot be."""
        args, rest = self.parse_known_args([dashed(word) for word in argv])
        training = parse(rest)
        if training.given:
            log(f"notice: {', '.join(sorted(map(flag, training.given)))}: not needed here")
        for note in training.notes:
            log(f"notice: {note}")
        return args, training


def check_shared(args: argparse.Namespace, ranks: Ranks) -> None:
    """ValueError unless all ranks hold one model, as the programs need that generate text."""
    stages = args.pipeline_model_parallel_size
    if args.model_parallel_size is None:
        args.model_parallel_size = ranks.world_size // max(stages, 1) or 1
    size = args.model_parallel_size
    if size * stages != ranks.world_size:
        given = f"--model-parallel-size {size}" + f" × --pipeline-model-parallel-size {stages}" * (stages > 1)
        raise ValueError(
            f"{given}, but the ranks that hold the model are all that were started, {ranks.world_size}: "
            "leave --model-parallel-size out; --nproc-per-node starts ranks"
        )


def open_model(args: argparse.Namespace, ranks: Ranks, log: Log) -> LoadedModel:
    """Make the process group and the groups of mpu, and load the model that the flags of `ModelParser` name.

    Every rank calls it. Raises as `load_for_inference` does, and ValueError for a device or layout that cannot be.
    """
    set_threads(ranks)
    device, why = choose_device(args.device, ranks)
    dtype, why_dtype = choose_precision(args.precision, device)
    for reason in (why, why_dtype):
        if reason.startswith(("WARNING", "notice")):
            log(reason)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    initialize_distributed(
        ranks, choose_backend(args.distributed_backend, device)[0], device, ParallelConfig().distributed_timeout_minutes
    )
    size, stages = args.model_parallel_size, args.pipeline_model_parallel_size
    if size < 1 or stages < 1 or ranks.world_size % (size * stages):
        product = f"--model-parallel-size {size}" + f" × --pipeline-model-parallel-size {stages}" * (stages != 1)
        raise ValueError(f"the world of {ranks.world_size} ranks is not divisible by {product}")
    mpu.initialize_model_parallel(size, stages)
    return load_for_inference(args.load, device, dtype, log=log)


def check_scores(args: argparse.Namespace) -> None:
    """ValueError or FileNotFoundError, before any work is done, if a flag of `ModelParser.add_scores` cannot be."""
    require(args.micro_batch_size >= 1, f"--micro-batch-size must be positive, not {args.micro_batch_size}")
    if args.output is not None and not Path(args.output).absolute().parent.is_dir():
        raise FileNotFoundError(f"--output {args.output}: its folder does not exist")


def record(loaded: LoadedModel, micro_batch_size: int) -> dict[str, Any]:
    """What every score of this model depends on, by name."""
    checkpoint, tokenizer = loaded.checkpoint, loaded.tokenizer
    return {
        "checkpoint": str(checkpoint.path),
        "iteration": checkpoint.iteration,
        "manifest_sha256": checkpoint.digest,  # which seals every file
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


def write_record(path: str | None, value: dict[str, Any]) -> None:
    """Write `value` as JSON into `path`, if there is one, whole or not at all; infinities and NaN, which JSON lacks,
    become null."""
    if path is not None:
        finite = json.loads(json.dumps(value), parse_constant=lambda name: None)
        replace_text(path, json.dumps(finite, indent=1, allow_nan=False) + "\n")
