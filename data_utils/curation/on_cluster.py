"""A stage's shards as a step of datatrove, which has executors for this machine, for Slurm and for Ray.

datatrove keeps marks of its own of the ranks that it completed, which know nothing of the input: they are not used.
A rank that runs again finds the manifests of its shards and has nothing to do.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_utils.curation.documents import Shard
from data_utils.curation.shard_run import Stage, run_shard

EXECUTORS = ("local", "slurm", "ray")
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, repr=False)
class ShardStep:
    """A pipeline of this one step: rank r of w does the shards r, r + w, r + 2w, …"""

    stage: Stage
    shards: Sequence[Shard]
    output: Path

    def __repr__(self) -> str:
        return f"{self.stage.name} of {len(self.shards)} shards"

    def __call__(self, data: Iterable[Any] | None, rank: int = 0, world_size: int = 1) -> None:
        for shard in self.shards[rank::world_size]:
            run_shard(self.stage, shard, self.output)


def launch(executor: str, stage: Stage, shards: Sequence[Shard], output: Path, *, tasks: int, workers: int,
           slurm: Sequence[str]) -> None:
    """Run the shards as `tasks` tasks, on this machine `workers` at once, or hand them to Slurm: `slurm` holds the time
    and the partition.

    ValueError where datatrove or Ray is not installed. A step's own error is whatever datatrove makes of it.
    """
    tasks = min(tasks, len(shards))
    step = ShardStep(stage, list(shards), output)
    logs = str(output / ".datatrove")
    # What starts elsewhere finds this very interpreter and this very project.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    try:
        if executor == "local":
            from datatrove.executor import LocalPipelineExecutor
            LocalPipelineExecutor([step], tasks=tasks, workers=workers, logging_dir=logs, skip_completed=False).run()
        elif executor == "ray":
            import ray  # noqa: F401
            from datatrove.executor import RayPipelineExecutor
            RayPipelineExecutor([step], tasks=tasks, logging_dir=logs, skip_completed=False).run()
        else:
            from datatrove.executor import SlurmPipelineExecutor
            time, partition = slurm
            path = f"export PATH={Path(sys.executable).parent}:$PATH PYTHONPATH={os.environ['PYTHONPATH']}"
            SlurmPipelineExecutor([step], tasks=tasks, time=time, partition=partition,
                                  job_name=stage.name.split(",")[0], env_command=path, logging_dir=logs,
                                  slurm_logs_folder=f"{logs}/slurm", skip_completed=False, qos="").run()
    except ImportError as error:
        raise ValueError(f"--executor {executor} needs {error.name}: python -m pip install -c constraints.txt -e "
                         "'.[curate]'" + (" ray" if error.name == "ray" else "")) from None
