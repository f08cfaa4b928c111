"""Helpers for the cells of distributed.ipynb. A notebook is one process, so each helper starts ranks from a file:

show("ranks.py")                                # the text of an example
start("examples/collectives.py")                # python with these arguments
change("ring_all_reduce.py", "=3)", "=4)")      # a changed copy of an example
on_ranks(function, 4)                           # function(rank, world_size), defined in a cell
"""

import contextlib
import inspect
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parent
HEADER = """import torch
import torch.distributed as dist
from ranks import run, say


"""


def show(file: str) -> object:
    """Return the source of an example, highlighted if IPython is available."""
    try:
        from IPython.display import Code
    except ImportError:
        return (EXAMPLES / file).read_text(encoding="utf-8")
    return Code(filename=str(EXAMPLES / file), language="python")


def start(*words: str, seconds: float = 600) -> None:
    """Run `python WORDS` in the project's folder. Print its output, or the last line of its error. The process is
    stopped after `seconds`, or when the cell is interrupted."""
    paths = [str(EXAMPLES), *filter(None, [os.environ.get("PYTHONPATH")])]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, *words],
            cwd=EXAMPLES.parent,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
        ended = threading.Event()

        def end() -> None:
            ended.set()
            for number in (signal.SIGINT, signal.SIGKILL):  # Ctrl-C, and a kill if that fails, reach the ranks, too.
                with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    os.killpg(process.pid, number)
                    process.wait(3)

        timer = threading.Timer(seconds, end)
        timer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                print(line, end="")
            code = process.wait()
        finally:
            timer.cancel()
            if process.poll() is None:
                end()
        errors.seek(0)
        if ended.is_set():
            print(f"it hangs: ended after {seconds:g} s")
        elif code:
            print(errors.read().rstrip().rpartition("\n")[2])


def change(file: str, old: str, new: str, seconds: float = 60) -> None:
    """Run a copy of an example with `old` replaced by `new`. Raises ValueError if the example does not contain
    `old`."""
    text = (EXAMPLES / file).read_text(encoding="utf-8")
    if old not in text:
        raise ValueError(f"examples/{file} has no {old!r}")
    _start_text(text.replace(old, new), seconds)


def on_ranks(function: Callable[[int, int], None], world_size: int = 2, seconds: float = 60) -> None:
    """Call function(rank, world_size) in `world_size` processes. The function's source goes into a file that imports
    only torch, dist and say."""
    source = textwrap.dedent(inspect.getsource(function))
    main = f"if __name__ == '__main__':\n    run({function.__name__}, {world_size})\n"
    _start_text(f"{HEADER}{source}\n\n{main}", seconds)


def _start_text(text: str, seconds: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "changed.py"
        path.write_text(text, encoding="utf-8")
        start(str(path), seconds=seconds)
