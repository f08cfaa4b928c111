"""scripts/evaluate_gpt2.sh: which checkpoint it takes, and what it starts."""

from __future__ import annotations

import os

from tests.test_scripts import Project, project  # noqa: F401


def test_it_starts_all_ranks_with_the_newest_checkpoint(project: Project) -> None:  # noqa: F811
    for time, name in ((2e9, "older"), (3e9, "the newest"), (1e9, "oldest")):
        tracker = project.elsewhere / "checkpoints" / name / "latest_checkpointed_iteration.txt"
        tracker.parent.mkdir(parents=True)
        tracker.write_text("1")
        os.utime(tracker, (time, time))
    words = project.words("evaluate_gpt2.sh", "--valid-data", "my file.txt", GPUS_PER_NODE="4", MPSIZE="2")
    assert words == [
        f"{project.root}/tools/evaluate_gpt2.py",
        *"--nproc-per-node 4 --nnodes 1 --node-rank 0 --model-parallel-size 2 --load".split(),
        "checkpoints/the newest",
        "--valid-data",
        "my file.txt",
    ]


def test_a_checkpoint_that_is_named(project: Project) -> None:  # noqa: F811
    words = project.words("evaluate_gpt2.sh", "--valid-data", "a", CHECKPOINT_PATH="else where")
    assert words[-6:] == ["--model-parallel-size", "1", "--load", "else where", "--valid-data", "a"]
    words = project.words("evaluate_gpt2.sh", "--load=mine", CHECKPOINT_PATH="else where")
    assert words[-3:] == ["--model-parallel-size", "1", "--load=mine"]


def test_what_is_started_is_not_taken_from_the_environment(project: Project) -> None:  # noqa: F811
    assert f"{project.root}/pretrain_gpt2.py" in project.words("pretrain_gpt2_distributed.sh", PROGRAM="other.py")


def test_no_checkpoint(project: Project) -> None:  # noqa: F811
    done = project.run("evaluate_gpt2.sh", "--valid-data", "a")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: no checkpoint is under checkpoints/: name one with CHECKPOINT_PATH=FOLDER\n"
