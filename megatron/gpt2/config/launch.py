"""The section `launch`: how the ranks start and meet. It is no part of the run that is saved."""

from dataclasses import dataclass

from megatron.gpt2.config.options import option, require, require_positive


@dataclass(frozen=True)
class LaunchConfig:
    """How the ranks start and meet. torchrun, srun and mpirun need none of these flags, and none is a part of the run
    that is saved: see megatron/gpt2/dist/launchers.py."""

    nproc_per_node: int | None = option(
        None, "ranks that this process starts on its machine; 0: one for each visible GPU, or two on a CPU"
    )
    nnodes: int = option(1, "machines, each of which starts --nproc-per-node ranks")
    node_rank: int = option(0, "the number of this machine among them, from 0")
    rank: int | None = option(None, "the number of this process among all, where each is started by hand")
    world_size: int | None = option(None, "the number of all processes, with --rank")
    init_method: str | None = option(
        None,
        "where the ranks meet: tcp://HOST:PORT of rank 0, or file:///PATH in a folder that they share",
        metavar="URL",
    )
    max_restarts: int = option(
        0,
        "with --nproc-per-node: how often the ranks are started again after one has failed; "
        "they continue from the newest checkpoint",
    )
    elastic: bool = option(
        False,
        "go on with the ranks that have come within --init-timeout, as many as divide "
        "--global-batch-size, and begin again when more have come",
    )
    init_timeout: float = option(120.0, "seconds within which all ranks must come")

    def __post_init__(self) -> None:
        require_positive(self, "world_size", "init_timeout")
        require(
            (self.nproc_per_node or 0) >= 0,
            f"--nproc-per-node {self.nproc_per_node}: give a number, or 0 for one on each GPU",
        )
        require(
            0 <= self.node_rank < self.nnodes,
            f"--node-rank {self.node_rank} is not in [0, {self.nnodes}), which --nnodes says",
        )
        require(
            self.nnodes == 1 or self.nproc_per_node is not None,
            "--nnodes needs --nproc-per-node, the ranks that each machine starts",
        )
        require(self.max_restarts >= 0, f"--max-restarts {self.max_restarts}: give a number of restarts, or 0")
        require(
            self.max_restarts == 0 or self.nproc_per_node is not None,
            "--max-restarts needs --nproc-per-node, the ranks that this process starts; torchrun has a "
            "--max-restarts of its own",
        )
        require((self.rank is None) == (self.world_size is None), "--rank and --world-size go together")
        require(
            self.rank is None or self.nproc_per_node is None,
            "--nproc-per-node starts all ranks itself: leave --rank and --world-size out",
        )
        if self.rank is not None and self.world_size is not None:
            require(
                0 <= self.rank < self.world_size,
                f"--rank {self.rank} is not in [0, {self.world_size}), which --world-size says",
            )
            require(
                self.init_method is not None or self.world_size == 1,
                "--rank needs --init-method: tcp://HOST:PORT of rank 0, or file:///PATH in a folder that the ranks "
                "share",
            )
