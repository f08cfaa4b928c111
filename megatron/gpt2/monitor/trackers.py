"""Experiment trackers: TensorBoard and Weights & Biases. Each has `log(numbers, iteration)` and `close()`."""

import importlib.util
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.gpt2.config import Config

WANDB_ID = "wandb_run_id.txt"


class TensorBoard:
    """Writes TensorBoard event files. Points of an earlier run after `start_iteration` are purged."""

    def __init__(self, config: Config, start_iteration: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(config.train.tensorboard_dir, purge_step=start_iteration + 1)
        self.close = self._writer.close

    def log(self, numbers: Mapping[str, float], iteration: int) -> None:
        """Write a scalar for each of the `numbers`."""
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, iteration)


class WeightsAndBiases:
    """Logs to Weights & Biases. A run that continues a --save folder also continues its run there.

    The file `wandb_run_id.txt` in the folder has the run's id.
    """

    def __init__(self, config: Config, start_iteration: int) -> None:
        import wandb

        train, save = config.train, Path(str(config.checkpoint.save))
        folder, known = Path(train.wandb_save_dir or save), save / WANDB_ID
        for path in (folder, save):  # otherwise wandb uses a temporary folder
            path.mkdir(parents=True, exist_ok=True)
        if not (start_iteration and known.exists()):
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
        self.close = self._run.finish

    def log(self, numbers: Mapping[str, float], iteration: int) -> None:
        """Send the `numbers` of this step."""
        self._run.log(dict(numbers), step=iteration)  # wandb ignores repeated steps


Tracker = TensorBoard | WeightsAndBiases


def open_trackers(config: Config, *, start_iteration: int, active: bool) -> list[Tracker]:
    """Open the trackers that the flags select; none if this rank is not `active`.

    Raises ValueError on every rank if one is not installed, and on the active rank if it cannot start.
    """
    trackers: list[Tracker] = []
    for flag, wanted, module, tracker in (
        ("--tensorboard-dir", config.train.tensorboard_dir, "tensorboard", TensorBoard),
        ("--wandb-project", config.train.wandb_project, "wandb", WeightsAndBiases),
    ):
        if wanted is not None and importlib.util.find_spec(module) is None:
            raise ValueError(f"{flag} needs {module}: pip install {module}")
        if wanted is not None and active:
            trackers.append(tracker(config, start_iteration))
    return trackers
