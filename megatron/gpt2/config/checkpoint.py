"""The section `checkpoint`: what is saved and what a run starts from."""

from dataclasses import dataclass

from megatron.gpt2.config.options import option, require, require_positive


@dataclass(frozen=True)
class CheckpointConfig:
    """What is saved, and what a run starts from."""

    save: str | None = option(None, "folder of checkpoints, metrics and plots (default: checkpoints/gpt2_<model>)")
    load: str | None = option(None, "folder to continue from (default: --save, where it holds a checkpoint)")
    save_interval: int | None = option(5000, "iterations between checkpoints; one is always saved at the end")
    no_save_optim: bool = option(False, "leave the optimizer out of checkpoints")
    no_save_rng: bool = option(False, "leave the random states out of checkpoints")
    no_load_optim: bool = option(False, "start with a fresh optimizer")
    no_load_rng: bool = option(False, "start with fresh random states")
    async_save: bool = option(False, "train on while a thread writes a copy of what is saved, which is in host memory")
    local_checkpoint_dir: str | None = option(
        None,
        "folder in the memory or on the disk of each machine, for further checkpoints from which a run goes on "
        "that died",
        "--non-persistent-local-ckpt-dir",
    )
    local_checkpoint_interval: int | None = option(
        None, "iterations between checkpoints in --local-checkpoint-dir", "--non-persistent-save-interval"
    )
    keep_last: int | None = option(None, "checkpoints that are kept, the newest ones (default: all)")
    keep_best: bool = option(False, "keep the checkpoint with the lowest validation loss as well, in the folder best")
    no_verify: bool = option(False, "load without hashing every byte; sizes, headers and the manifest are checked")
    finetune: bool = option(False, "take the weights of --load alone and count from iteration 0")
    exit_on_missing_checkpoint: bool = option(False, "an error, not a warning, where --load holds no checkpoint")

    def __post_init__(self) -> None:
        require(not self.finetune or self.load is not None, "--finetune needs --load: the folder to take weights from")
        require(
            (self.local_checkpoint_dir is None) == (self.local_checkpoint_interval is None),
            "--local-checkpoint-dir and --local-checkpoint-interval go together: give both, or neither",
        )
        require_positive(self, "save_interval", "keep_last", "local_checkpoint_interval")
