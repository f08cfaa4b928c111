"""Run the shell scripts with a stub `python` that prints its command line.

The scripts run in a small copy of the project. PATH has only the stub and the few programs that the scripts call. The
stub behaves as if it had the modules $STUB_HAS and $STUB_GPUS GPUs. Its environments contain a copy of the stub. Its
pip installs $STUB_INSTALLS, or fails if the variable is not set.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LEAST = "torch numpy safetensors"
TRAINING = f"{LEAST} tiktoken sentencepiece ftfy tokenizers tqdm matplotlib"

STUB = r"""#!/bin/bash
case "$0" in */.venv/*) STUB_HAS=$(cat "$0.installed" 2>/dev/null) ;; esac
case "$1 $2" in
    "--version ") echo "Python 3.12.0" ;;
    "-c import sys, venv"*) ;;
    "-c "*find_spec*)
        shift 2
        for name in "$@"; do
            case " $STUB_HAS " in *" $name "*) ;; *) exit 1 ;; esac
        done ;;
    "-c import torch;"*) echo "${STUB_GPUS:-2}" ;;
    "-c "*) exec "$REAL_PYTHON" "$@" ;;
    "-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    "-m pip")
        echo "pip: $*" >&2
        [ -n "${STUB_INSTALLS:-}" ] || exit 1
        echo "$STUB_INSTALLS" >"$0.installed" ;;
    *)
        echo "run by $0 in $PWD with OMP_NUM_THREADS=${OMP_NUM_THREADS:-}"
        for word in "$@"; do echo "<$word>"; done
        [ "$1 $2" != "${STUB_FAILS:-}" ] || exit 3 ;;
esac
"""


class Project:
    """A folder with a copy of scripts/, and a folder for PATH with the stub `python`."""

    def __init__(self, folder: Path) -> None:
        self.root, self.bin, self.elsewhere = folder / "project", folder / "bin", folder / "else where"
        shutil.copytree(ROOT / "scripts", self.root / "scripts")
        shutil.copy(ROOT / "constraints.txt", self.root)
        self.bin.mkdir()
        self.elsewhere.mkdir()
        for name in ("bash", "dirname", "grep", "mkdir", "cp", "cat", "getconf"):
            found = shutil.which(name)
            assert found, f"the scripts call {name}"
            (self.bin / name).symlink_to(found)
        self.program("python", STUB)

    def program(self, name: str, text: str) -> None:
        """Write a program into PATH."""
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def run(self, line: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a line of a shell: environment variables, the name of a script, and its flags."""
        line = re.sub(r"\b\w+\.(sh|slurm)\b", rf"bash {self.root}/scripts/\g<0>", line, count=1)
        environment = {"PATH": str(self.bin), "REAL_PYTHON": sys.executable, "STUB_HAS": TRAINING, **variables}
        return subprocess.run(
            [str(self.bin / "bash"), "-c", line],
            text=True,
            capture_output=True,
            env=environment,
            cwd=self.elsewhere,
            timeout=240,
            check=False,
        )


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def test_scripts_stop_at_errors() -> None:
    scripts = [*(ROOT / "scripts").iterdir(), ROOT / ".ci" / "run"]
    assert len(scripts) > 10
    for path in scripts:
        subprocess.run(["bash", "-n", str(path)], check=True)
        assert "set -euo pipefail" in path.read_text() or not path.read_text().startswith("#!"), path


def test_an_environment_is_made_if_a_package_is_missing(project: Project) -> None:
    variables = {"STUB_HAS": LEAST, "STUB_INSTALLS": TRAINING}
    done = project.run("pretrain_gpt2.sh", **variables)
    assert done.returncode == 0, done.stderr
    own = project.root / ".venv" / "bin" / "python"
    assert done.stdout.startswith(f"run by {own} ")
    assert f"making {project.root}/.venv" in done.stderr and "torch==2.13.0" in done.stderr
    assert done.stderr.rstrip().endswith(f"-c {project.root}/constraints.txt -e {project.root}")
    again = project.run("pretrain_gpt2.sh", **variables)
    assert again.stdout.startswith(f"run by {own} ") and again.stderr == ""


def test_without_a_network_or_python(project: Project) -> None:
    """If pip fails, the scripts use a Python that has the packages of LEAST. Without a usable Python they print an
    error."""
    done = project.run("pretrain_gpt2.sh", STUB_HAS=LEAST)
    assert done.returncode == 0 and done.stdout.startswith(f"run by {project.bin}/python "), done.stderr
    assert "notice: the installation failed; going on with" in done.stderr
    done = project.run("pretrain_gpt2.sh", STUB_HAS="numpy")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-1] == (
        "error: the installation failed, see above. Without a network, activate an environment that has: " + TRAINING
    )
    shutil.rmtree(project.root / ".venv")
    (project.bin / "python").unlink()
    done = project.run("pretrain_gpt2.sh")
    assert done.returncode == 1 and "found no Python 3.10 or newer" in done.stderr


def test_tools_find_the_project(project: Project) -> None:
    done = project.run("PYTHONPATH=/theirs python.sh -c 'import os; print(os.environ[\"PYTHONPATH\"])' -x")
    assert done.stdout == f"{project.root}:/theirs\n", done.stderr


def training(nproc: int = 0, nnodes: int = 1, rank: int = 0, size: int | None = None) -> str:
    model_parallel = "" if size is None else f" --tensor-model-parallel-size {size}"
    return f"PROJECT/pretrain_gpt2.py --nproc-per-node {nproc} --nnodes {nnodes} --node-rank {rank}{model_parallel}"


DISTRIBUTED, MODEL_PARALLEL = "pretrain_gpt2_distributed.sh", "pretrain_gpt2_model_parallel.sh"
GENERATE, SERVE = "PROJECT/tools/generate_text.py", "PROJECT/tools/run_text_generation_server.py"
EVALUATE = "PROJECT/tools/evaluate_gpt2.py --nproc-per-node {} --nnodes 1 --node-rank 0 --tensor-model-parallel-size"
NEWEST = "--load 'checkpoints/the newest'"


@pytest.mark.parametrize(
    "line, started",
    [
        ("pretrain_gpt2.sh --train-data 'my file' --lr 1", "PROJECT/pretrain_gpt2.py --train-data 'my file' --lr 1"),
        (f"NNODES=2 NODE_RANK=1 GPUS_PER_NODE=8 {DISTRIBUTED}", training(8, 2, 1)),
        (f"MP_SIZE=7 GPUS_PER_NODE=1 {DISTRIBUTED}", training(1)),  # pretrain_gpt2_distributed.sh ignores MP_SIZE.
        # A flag of the user follows the script's flag and overrides it.
        (f"{MODEL_PARALLEL} --model-parallel-size 1", f"{training(size=2)} --model-parallel-size 1"),
        (f"MP_SIZE=4 NNODES=02 GPUS_PER_NODE=08 {MODEL_PARALLEL}", training(8, 2, size=4)),
        ("generate_text.sh --prompt 'a b'", f"{GENERATE} --nproc-per-node 1 {NEWEST} --prompt 'a b'"),
        (
            "CHECKPOINT_PATH='my run' TEMP=0.9 TOPK=5 TOPP=0.5 MAXSEQLEN=64 generate_text.sh",
            f"{GENERATE} --nproc-per-node 1 --load 'my run' --temperature 0.9 --top-k 5 --top-p 0.5 --max-new-tokens "
            "64",
        ),
        (
            "MPSIZE=02 CHECKPOINT_PATH='my run' run_text_generation_server.sh --port 0",
            f"{SERVE} --nproc-per-node 2 --load 'my run' --port 0",
        ),
        (
            "GPUS_PER_NODE=4 MPSIZE=2 evaluate_gpt2.sh --valid-data 'my file.txt'",
            f"{EVALUATE.format(4)} 2 {NEWEST} --valid-data 'my file.txt'",
        ),
    ],
)
def test_what_a_script_starts(project: Project, line: str, started: str) -> None:
    """A script uses the active environment and keeps the current folder."""
    for time, name in ((2e9, "older"), (3e9, "the newest"), (1e9, "oldest")):
        tracker = project.elsewhere / "checkpoints" / name / "latest_checkpointed_iteration.txt"
        tracker.parent.mkdir(parents=True)
        tracker.touch()
        os.utime(tracker, (time, time))
    done = project.run(line)
    assert done.returncode == 0 and not (project.root / ".venv").exists(), done.stderr
    assert done.stdout.startswith(f"run by {project.bin}/python in {project.elsewhere} ")
    words = [word[1:-1] for word in done.stdout.splitlines() if word.startswith("<")]
    assert [word.replace(str(project.root), "PROJECT") for word in words] == shlex.split(started)


def test_no_checkpoint(project: Project) -> None:
    done = project.run("generate_text.sh")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: no checkpoint is under checkpoints/: name one with CHECKPOINT_PATH=FOLDER\n"


@pytest.mark.parametrize(
    "line, message",
    {
        "GPUS_PER_NODE=0": "GPUS_PER_NODE=0 is not a whole number from 1 to 99999: give the ranks",
        "GPUS_PER_NODE=99999999999999999999": "GPUS_PER_NODE=99999999999999999999 is not a whole number",
        "NNODES=1.5": "NNODES=1.5 is not a whole number from 1 to 99999: give the number of nodes",
        "NODE_RANK=1": "NODE_RANK=1 is not a whole number from 0 to 0: give the number of this node, below NNODES=1",
        "MPSIZE=-2": "MPSIZE=-2 is not a whole number from 1 to 99999: give the ranks that share each layer",
    }.items(),
)
def test_a_layout_that_cannot_be_ends_in_one_line(project: Project, line: str, message: str) -> None:
    for script in (MODEL_PARALLEL, "generate_text.sh" if line.startswith("MP") else DISTRIBUTED):
        done = project.run(f"{line} {script}")
        assert (done.returncode, done.stdout) == (2, ""), done.stderr
        assert done.stderr.startswith(f"error: {message}") and done.stderr.count("\n") == 1


def test_the_test_script_fails_if_one_of_its_tools_does(project: Project) -> None:
    """If packages are missing and cannot be installed, test.sh names them and stops."""
    done = project.run("test.sh")
    assert done.returncode == 1 and "<pytest>" not in done.stdout
    needed = done.stderr.splitlines()[-1].partition("activate an environment that has: ")[2]
    assert {*TRAINING.split(), "pytest", "ruff", "mypy"} < set(needed.split())
    assert f"-e {project.root}[dev,hf,data,curate,eval,serve]" in done.stderr
    for tool, code in {"": 0, "ruff": 3, "mypy": 1, "pytest": 3}.items():
        done = project.run("test.sh -k 'a name'", STUB_HAS=needed, STUB_FAILS=f"-m {tool}")
        assert done.returncode == code
        assert ("<pytest>" in done.stdout and "<-k>\n<a name>\n" in done.stdout) == (tool != "ruff")
        assert ("error: mypy failed, see above" in done.stderr) == (tool == "mypy")


def test_slurm(project: Project) -> None:
    project.program("srun", '#!/bin/bash\necho "$OMP_NUM_THREADS $SRUN_CPUS_PER_TASK $*"\n')
    variables = {"SLURM_SUBMIT_DIR": str(project.root), "SLURM_JOB_ID": "123456", "SLURM_CPUS_PER_TASK": "8"}
    done = project.run("pretrain_gpt2.slurm --model 345m", **variables)
    started = f"{project.bin}/python {project.root}/pretrain_gpt2.py --model 345m"
    assert done.stdout == f"8 8 --kill-on-bad-exit=1 {started}\n", done.stderr
    done = project.run("pretrain_gpt2.slurm", **variables | {"SLURM_SUBMIT_DIR": str(project.elsewhere)})
    assert done.returncode == 2 and "call sbatch in the project's folder" in done.stderr


def test_slurm_queues_an_unfinished_run_again(project: Project) -> None:
    """The Slurm script queues a job again if its run died or was stopped, up to a limit. A finished, cancelled or
    refused run is not queued again."""
    srun = (
        '#!/bin/bash\n[ -z "$REASON" ] || echo "{\\"reason\\": \\"$REASON\\"}" > ended.json\n'
        '[ "$REASON" != cancelled ] || kill -TERM $PPID\nexit "$CODE"'
    )
    project.program("srun", srun)
    project.program("scontrol", '#!/bin/bash\necho "$@"')
    for reason, code, restarts, words, queued in (
        ("", 1, 0, "--save .", True),
        ("SIGTERM", 0, 3, "--save=.", True),
        ("finished", 0, 3, "--save .", False),
        ("cancelled", 0, 0, "--save .", False),
        ("", 2, 0, "--save .", False),
        ("", 1, 10, "--save .", False),
        ("", 1, 0, "", False),
    ):
        (project.root / "ended.json").unlink(missing_ok=True)
        done = project.run(
            f"pretrain_gpt2.slurm {words}",
            SLURM_SUBMIT_DIR=str(project.root),
            SLURM_JOB_ID="123456",
            REASON=reason,
            CODE=str(code),
            SLURM_RESTART_COUNT=str(restarts),
        )
        assert (done.returncode, done.stdout) == (code, "requeue 123456\n" if queued else ""), (reason, done.stderr)
