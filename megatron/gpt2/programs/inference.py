"""What the programs around a trained model share: their flags, and how they load the model."""

import argparse

import torch

import mpu
from data_utils.command_line import Parser
from megatron.gpt2.command_line.flags import add_section
from megatron.gpt2.config import PRECISION_CHOICES, LaunchConfig, ParallelConfig
from megatron.gpt2.device import choose_backend, choose_device, choose_precision, set_threads
from megatron.gpt2.launch.ranks import Ranks
from megatron.gpt2.launch.rendezvous import initialize_distributed
from megatron.gpt2.launch.run_program import Log
from megatron.gpt2.text.load_model import LoadedModel, load_for_inference


class ModelParser(Parser):
    """The parser of a program that uses a trained model: it knows the flags for the model and for where it runs.

    precision: the default of --precision. model_parallel_size: the default of --model-parallel-size.
    """

    def __init__(self, doc: str | None, *, precision: str, model_parallel_size: int = 1) -> None:
        super().__init__(description=doc)
        self.add_argument("--load", required=True, metavar="DIR", help="the --save folder of a training run")
        self.add_argument("--model-parallel-size", "--tensor-model-parallel-size", type=int, metavar="N",
                          default=model_parallel_size,
                          help="ranks that share each layer, whatever the checkpoint's were (default: %(default)s)")
        self.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
        self.add_argument("--precision", default=precision, choices=PRECISION_CHOICES,
                          help=f"default: {precision}")
        for name, meant in (("fp16", "fp16-on-gpu"), ("bf16", "bf16")):
            self.add_argument(f"--{name}", dest="precision", action="store_const", const=meant, help=argparse.SUPPRESS)
        self.add_argument("--distributed-backend", choices=("nccl", "gloo"), help="default: by the device")
        add_section(self, "launch", LaunchConfig)  # `run_program` has read them


def check_shared(args: argparse.Namespace, ranks: Ranks) -> None:
    """ValueError unless all ranks share each layer, as the programs need that generate text."""
    if args.model_parallel_size != ranks.world_size:
        raise ValueError(f"--model-parallel-size {args.model_parallel_size}, but the ranks that share each layer are "
                         f"all that were started, {ranks.world_size}: leave the flag out; --nproc-per-node starts "
                         "ranks")


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
    initialize_distributed(ranks, choose_backend(args.distributed_backend, device)[0], device,
                           ParallelConfig().distributed_timeout_minutes)
    if args.model_parallel_size < 1 or ranks.world_size % args.model_parallel_size:
        raise ValueError(f"the world of {ranks.world_size} ranks is not divisible by --model-parallel-size "
                         f"{args.model_parallel_size}")
    mpu.initialize_model_parallel(args.model_parallel_size)
    return load_for_inference(args.load, device, dtype, log=log)
