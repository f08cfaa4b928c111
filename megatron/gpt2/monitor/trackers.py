"""Programs that draw the numbers of a run: TensorBoard and Weights & Biases."""

import importlib.util
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from megatron.gpt2.config import Config

WANDB_ID = "wandb_run_id.txt"


class Tracker(Protocol):
    """A program that draws the numbers of a run."""

    def log(self, numbers: Mapping[str, float], iteration: int) -> None:
        """Give it numbers by name, of this iteration."""

    def close(self) -> None:
        """Write what is left, and end."""


def open_trackers(config: Config, *, start_iteration: int, active: bool) -> list[Tracker]:
    """The trackers that the flags ask for; none where this rank is not `active`.

    Raises ValueError on every rank alike where one is not installed, and on the active rank where it cannot begin.
    """
    train, trackers = config.train, list[Tracker]()
    for flag, wanted, module in (
        ("--tensorboard-dir", train.tensorboard_dir, "tensorboard"),
        ("--wandb-project", train.wandb_project, "wandb"),
    ):
        if wanted is not None and importlib.util.find_spec(module) is None:
            raise ValueError(f"{flag} needs {module}: pip install {module}")
    if active and train.tensorboard_dir is not None:
        trackers.append(TensorBoard(train.tensorboard_dir, start_iteration))
    if active and train.wandb_project is not None:
        trackers.append(WeightsAndBiases(config, start_iteration))
    return trackers


class TensorBoard:
    """TensorBoard's event files; what an earlier run wrote beyond `start_iteration` is no longer shown."""

    def __init__(self, folder: str, start_iteration: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(folder, purge_step=start_iteration + 1)

    def log(self, numbers: Mapping[str, float], iteration: int) -> None:
        """Write a scalar for each of the `numbers`."""
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, iteration)

    def close(self) -> None:
        """Write what is left, and close the file."""
        self._writer.close()


class WeightsAndBiases:
    """One run of Weights & Biases per --save folder: a run that continues, continues there too.

    The file `wandb_run_id.txt` in the folder holds its id.
    """

    def __init__(self, config: Config, start_iteration: int) -> None:
        import wandb

        train, save = config.train, Path(str(config.checkpoint.save))
        folder, known = Path(train.wandb_save_dir or save), save / WANDB_ID
        folder.mkdir(parents=True, exist_ok=True)  # wandb would take a temporary one
        if not (start_iteration and known.exists()):
            known.parent.mkdir(parents=True, exist_ok=True)
            known.write_text(secrets.token_hex(4) + "\n", encoding="ascii")
        try:
            self._run: Any = wandb.init(
                project=train.wandb_project,
                entity=train.wandb_entity,
                name=train.wandb_exp_name or save.name,
                dir=folder,
                id=known.read_text(encoding="ascii").strip(),
                resume="allow",
                config=config.as_dict(),
            )
        except wandb.Error as error:
            raise ValueError(
                f"--wandb-project {train.wandb_project}: {error} (WANDB_MODE=offline needs neither network nor account)"
            ) from error

    def log(self, numbers: Mapping[str, float], iteration: int) -> None:
        """Send the `numbers` as those of this step."""
        self._run.log(dict(numbers), step=iteration)  # steps that are done again are there already, and ignored

    def close(self) -> None:
        """Mark the run as finished."""
        self._run.finish()
