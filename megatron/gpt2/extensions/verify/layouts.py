"""The layouts of a comparison: flags of pretrain_gpt2, and how many ranks they take."""

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from data_utils.command_line import Parser
from megatron.gpt2.checkpoint.facts import check_facts, decay_iters
from megatron.gpt2.checkpoint.folder import find_checkpoint
from megatron.gpt2.config import require
from megatron.gpt2.config.arguments import Arguments, merge_checkpoint, parse
from megatron.gpt2.config.flags import launch_flags
from megatron.gpt2.dist.launchers import Launch


@dataclass(frozen=True)
class Layout:
    """flags: as they were given. words: the whole command line of pretrain_gpt2 without what starts ranks."""

    flags: str
    words: tuple[str, ...]
    world_size: int

    @property
    def name(self) -> str:
        """What a person reads: its flags, or that it has none."""
        return self.flags or "(no flags)"

    @property
    def launch(self) -> Launch:
        """All of its ranks, started on this machine."""
        return Launch(world_size=self.world_size, local=(0, self.world_size), starts=self.world_size)


def read_layout(common: Sequence[str], flags: str) -> Layout:
    """The layout of the command line `common` with `flags` behind it. ValueError where it cannot be.

    --nproc-per-node gives its ranks, or --data-parallel-size, a field of layouts alone; without both it takes the
    model-parallel size, tensor × pipeline.
    """
    launch, rest = launch_flags([*common, *shlex.split(flags)])
    require(
        launch.rank is None and launch.nnodes == 1,
        f"--layout {flags!r}: all ranks of a layout start on this machine: leave out --rank, --world-size and --nnodes",
    )
    own = Parser(add_help=False, argument_default=argparse.SUPPRESS)
    own.add_argument("--data-parallel-size", type=int)
    given, words = own.parse_known_args(rest)
    try:
        arguments = parse(words)
        p = arguments.config.parallel.model_parallel_size * arguments.config.parallel.pipeline_model_parallel_size
        dp = vars(given).get("data_parallel_size")
        if launch.nproc_per_node is None:
            world_size = p * (1 if dp is None else dp)
        else:
            world_size = launch.nproc_per_node or torch.cuda.device_count() or 2
            require(
                dp is None or p * dp == world_size,
                f"--nproc-per-node {world_size} is not the model-parallel size {p} × --data-parallel-size {dp}",
            )
        require(world_size >= 1, f"--data-parallel-size must be at least 1, not {dp}")
        require(world_size % p == 0, f"--nproc-per-node {world_size} is not divisible by the model-parallel size {p}")
    except ValueError as error:
        raise ValueError(f"--layout {flags!r}: {error}") from error
    return Layout(flags, tuple(words), world_size)


def with_one_batch(layouts: Sequence[Layout]) -> list[Layout]:
    """The layouts, each with the global batch of the first where it says none of its own. ValueError where two say
    different ones, or where a batch cannot be divided among its ranks."""
    together = _arguments(layouts[0]).config.batch_schedule(layouts[0].world_size).final
    whole = []
    for layout in layouts:
        given = parse(layout.words).values.get("train.global_batch_size")
        require(
            given in (None, together),
            f"--layout {layout.flags!r}: its --global-batch-size is {given}, and that of the first layout "
            f"{together}: a step must take the same samples in each",
        )
        with_batch = replace(
            layout, words=layout.words if given else (*layout.words, "--global-batch-size", str(together))
        )
        try:
            _arguments(with_batch).config.batch_schedule(layout.world_size)
        except ValueError as error:
            raise ValueError(f"--layout {layout.flags!r}: {error}: give it another --micro-batch-size") from error
        whole.append(with_batch)
    return whole


def _arguments(layout: Layout) -> Arguments:
    """The command line of a layout, with what the checkpoint decides that it continues."""
    arguments = parse(layout.words)
    if (folder := arguments.checkpoint.load) is None:
        return arguments
    checkpoint = find_checkpoint(folder, log=lambda line: None, verify=False)
    if checkpoint is None:
        raise ValueError(f"--load {folder} holds no checkpoint")
    check_facts(checkpoint)
    return merge_checkpoint(arguments, checkpoint.facts["config"], decay_iters(checkpoint.facts))
