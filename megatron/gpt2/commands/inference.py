"""Flags, loading of the model, and the JSON file of scores, for all programs that use a trained model."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import mpu
from data_utils.command_line import Log, Parser, plural, positive_int
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

    precision: the default of --precision.
    tensor_model_parallel_size: the default of --tensor-model-parallel-size; None: the number of ranks /
        --pipeline-model-parallel-size, see `check_world_size`.
    """

    def __init__(self, doc: str | None, *, precision: str, tensor_model_parallel_size: int | None = 1) -> None:
        super().__init__(description=doc)
        self.add_argument("--load", required=True, metavar="DIR", help="the --save folder of a training run")
        self.add_argument(
            "--tensor-model-parallel-size",
            "--model-parallel-size",
            type=positive_int,
            metavar="N",
            default=tensor_model_parallel_size,
            help="ranks that share each layer; may differ from the checkpoint's (default: "
            f"{tensor_model_parallel_size or 'all'})",
        )
        self.add_argument(
            "--pipeline-model-parallel-size",
            type=positive_int,
            metavar="N",
            default=1,
            help="ranks that hold successive layers (default: 1)",
        )
        self.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
        self.add_argument("--precision", default=precision, choices=PRECISION_CHOICES, help=f"default: {precision}")
        for name, meant in (("fp16", "fp16-on-gpu"), ("bf16", "bf16")):
            self.add_argument(f"--{name}", dest="precision", action="store_const", const=meant, help=argparse.SUPPRESS)
        self.add_argument("--distributed-backend", choices=("nccl", "gloo"), help="default: by the device")
        add_section(self, "launch", LaunchConfig)  # `run_program` has parsed these flags.

    def add_scoring_flags(self, *batch_names: str) -> None:
        """Add the flags of a program that scores texts; `check_output` checks them.

        batch_names: further names of --micro-batch-size.
        """
        self.add_argument(
            "--micro-batch-size",
            "--batch-size",
            *batch_names,
            type=positive_int,
            default=4,
            metavar="N",
            help="texts computed together (default: 4)",
        )
        self.add_argument("--output", metavar="FILE", help="write the result there, as JSON")

    def parse_with_training_flags(self, argv: Sequence[str], log: Log) -> tuple[argparse.Namespace, Arguments]:
        """Parse the flags of this program, and flags of training, which Megatron's command lines contain. `log` gets a
        notice of the latter. Raises ValueError if a flag is unknown or invalid."""
        args, rest = self.parse_known_args([with_dashes(word) for word in argv])
        training = parse(rest)
        if training.given:
            log(f"notice: {', '.join(sorted(map(flag_name, training.given)))}: not needed here")
        for note in training.notes:
            log(f"notice: {note}")
        return args, training


def check_world_size(args: argparse.Namespace, rank_info: RankInfo) -> None:
    """Raise ValueError unless all ranks together hold one model. Programs that generate text need such a layout."""
    stages = args.pipeline_model_parallel_size
    if args.tensor_model_parallel_size is None:
        args.tensor_model_parallel_size = rank_info.world_size // stages or 1
    if args.tensor_model_parallel_size * stages != rank_info.world_size:
        raise ValueError(
            f"{_layout(args)}, but {plural(rank_info.world_size, 'rank')} started, and all ranks must hold the model: "
            "omit --tensor-model-parallel-size; --nproc-per-node starts ranks"
        )


def _layout(args: argparse.Namespace) -> str:
    size, stages = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    return f"--tensor-model-parallel-size {size}" + f" × --pipeline-model-parallel-size {stages}" * (stages > 1)


def open_model_from_flags(
    args: argparse.Namespace, rank_info: RankInfo, log: Log, *, single_row: bool = False
) -> LoadedModel:
    """Make the process group and the groups of mpu, and load the model that the flags of `ModelParser` name.

    Every rank must call this function. Raises the errors of `load_for_inference`, and ValueError for an invalid device
    or layout.

    single_row: see `mpu.weight_for_inference`.
    """
    set_threads(rank_info)
    device, why = choose_device(args.device, rank_info)
    dtype, why_dtype = choose_precision(args.precision, device)
    for reason in (why, why_dtype):
        if reason.startswith(("WARNING", "notice")):
            log(reason)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    initialize_distributed(
        rank_info,
        choose_backend(args.distributed_backend, device)[0],
        device,
        ParallelConfig().distributed_timeout_minutes,
    )
    size, stages = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    if rank_info.world_size % (size * stages):
        raise ValueError(f"the world size {rank_info.world_size} is not divisible by {_layout(args)}")
    mpu.initialize_model_parallel(size, stages)
    return load_for_inference(args.load, device, dtype, log=log, single_row=single_row)


def check_output(args: argparse.Namespace) -> None:
    """Raise FileNotFoundError if the folder of --output does not exist."""
    if args.output is not None and not Path(args.output).absolute().parent.is_dir():
        raise FileNotFoundError(f"--output {args.output}: its folder does not exist")


def score_metadata(loaded: LoadedModel, micro_batch_size: int) -> dict[str, Any]:
    """Return the settings on which every score of this model depends."""
    checkpoint, tokenizer = loaded.checkpoint, loaded.tokenizer
    return {
        "checkpoint": str(checkpoint.path),
        "iteration": checkpoint.iteration,
        "manifest_sha256": checkpoint.manifest_sha256,  # covers every file of the checkpoint
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
