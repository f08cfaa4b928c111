"""`--eval-tasks`: scores local benchmark files while a run trains, in any layout, as tools/evaluate_gpt2.py does."""

from pathlib import Path

import torch

from megatron.gpt2.config import Config
from megatron.gpt2.generate.evaluation import EvaluationTask, evaluate_task, read_task
from megatron.gpt2.hooks import Hook
from megatron.gpt2.monitor.log_lines import TaskRecord
from megatron.gpt2.train.trainer import Trainer

NAMES = ("hellaswag", "lambada")


class EvalTasks(Hook):
    """Scores the file of each task at each evaluation, and logs the accuracy."""

    def __init__(self, config: Config) -> None:
        self._names = [name for text in config.train.eval_tasks for name in text.split(",")]
        self._folder, self._tasks = config.train.eval_tasks_folder, dict[str, EvaluationTask]()

    def validate(self, config: Config, device: torch.device) -> None:
        """Raise ValueError if --eval-tasks has an unknown name, or FileNotFoundError if a task has no file."""
        if unknown := [name for name in self._names if name not in NAMES]:
            raise ValueError(f"--eval-tasks {unknown[0]}: one of {', '.join(NAMES)}")
        if self._folder is None:
            raise ValueError(
                "--eval-tasks needs --eval-tasks-folder: the folder with hellaswag*.jsonl or lambada*.jsonl"
            )
        for name in self._names:
            self._file(name)

    def _file(self, name: str) -> str:
        files = sorted(Path(str(self._folder)).glob(f"{name}*.jsonl"))
        if len(files) != 1:
            raise FileNotFoundError(
                f"--eval-tasks-folder {self._folder}: needs one file {name}*.jsonl, and has {len(files)}"
            )
        return str(files[0])

    def on_train_begin(self, trainer: Trainer) -> None:
        """Read the files."""
        data, length = trainer.data, trainer.config.model.max_position_embeddings
        for name in self._names:
            self._tasks[name] = read_task(
                name.upper(), self._file(name), data.tokenizer, length=length, strict_lambada=True, log=trainer.log.info
            )

    def on_evaluate(self, trainer: Trainer) -> None:
        """Score the file of each task, and log a line with its accuracy."""
        model, iteration = trainer.state.model, trainer.progress.iteration
        # `evaluate_task` does not call the model's `forward`, whose hook waits until all weights are gathered.
        trainer.state.param_gather.finish_param_sync()
        for name, task in self._tasks.items():
            metrics = evaluate_task(
                model, task, trainer.data.tokenizer, batch_size=trainer.config.train.micro_batch_size
            )
            record = TaskRecord(iteration, name, metrics["accuracy"], metrics.get("accuracy_norm"))
            trainer.log.record(record)
            norm = "" if record.accuracy_norm is None else f" | accuracy per character: {record.accuracy_norm:.4f}"
            trainer.log.info(f"{name} at iteration {iteration} | accuracy: {record.accuracy:.4f}{norm}")
