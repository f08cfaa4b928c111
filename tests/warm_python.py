"""A process that has torch loaded and forks for each command: what stands in the PATH as `python` while the commands of
the pages run. They start in a twentieth of a second instead of three; all the rest is as a new interpreter has it.

    server = WarmPython(folder)        # folder/bin/python is the command; put folder/bin first in PATH
    server.close()
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS = ("pretrain_gpt2", "generate_text", "evaluate_gpt2", "checkpoint", "plan", "preprocess_data", "inspect_data")
LIBRARIES = ("matplotlib.backends.backend_agg", "tiktoken", "torch.distributed.run",
             "transformers.models.gpt2.modeling_gpt2")

# It hands over its arguments, folder, environment and standard streams, waits, and ends as the command did.
CLIENT = """#!{python} -IS
import json, os, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
socket.send_fds(server, [b"-"], [0, 1, 2])
server.sendall(json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode())
server.shutdown(socket.SHUT_WR)
sys.exit(int(server.recv(4) or 1))
"""


class WarmPython:
    def __init__(self, folder: Path):
        """Starts the process; returns when it listens."""
        address = f"{folder}/socket"
        client = folder / "bin" / "python"
        client.parent.mkdir()
        client.write_text(CLIENT.format(python=sys.executable, address=address))
        client.chmod(0o755)
        (client.parent / "python3").symlink_to(client)
        torchrun = client.with_name("torchrun")
        torchrun.write_text(f'#!/bin/sh\nexec {client} -m torch.distributed.run "$@"\n')
        torchrun.chmod(0o755)
        self.path = f"{client.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen([sys.executable, "-m", "tests.warm_python", address], cwd=ROOT, text=True,
                                        env=environment, stdout=subprocess.PIPE, start_new_session=True)
        assert self.process.stdout.readline() == "listening\n"

    def close(self) -> None:
        """Ends the process and every command that still runs."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process.stdout.close()


def serve(address: str) -> list[str]:
    """Forks for each client. Returns the client's arguments, in the process that is to run them."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    print("listening", flush=True)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that wait for the commands
    while True:
        client, _ = listener.accept()
        if os.fork() == 0:
            break
        client.close()
    listener.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _, streams, _, _ = socket.recv_fds(client, 1, 3)
    argv, folder, environment = json.loads(client.makefile().read())
    command = os.fork()
    if command:
        _, status = os.waitpid(command, 0)
        code = os.waitstatus_to_exitcode(status)
        with contextlib.suppress(BrokenPipeError):  # a client that was killed
            client.sendall(str(code if code >= 0 else 128 - code).encode())
        os._exit(0)
    client.close()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.executable = f"{Path(address).parent}/bin/python"  # for the programs that a command starts
    return argv


def run(argv: list[str]) -> None:
    """`python ARGV`: a file, `-m MODULE` or `-c CODE`, with the arguments after it. -u, torchrun's, changes nothing."""
    argv = argv[argv[0] == "-u":]
    given = [entry for entry in os.environ.get("PYTHONPATH", "").split(":") if entry]
    sys.path[:] = [*given, *(entry for entry in sys.path if entry != str(ROOT))]
    if argv[0] == "-c":
        sys.argv = ["-c", *argv[2:]]
        sys.path.insert(0, "")
        exec(compile(argv[1], "<string>", "exec"), {"__name__": "__main__"})
    elif argv[0] == "-m":
        sys.argv = argv[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = argv
        sys.path.insert(0, str(Path(argv[0]).resolve().parent))
        runpy.run_path(argv[0], run_name="__main__")


def exit_code(argv: list[str]) -> int:
    """`run`, and what an interpreter does at its end but for taking itself apart, which takes as long as the start."""
    try:
        run(argv)
        code: object = 0
    except SystemExit as exit:
        code = exit.code
    except BaseException:
        traceback.print_exc()
        code = 1
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code or 0


def preload() -> None:
    """The libraries, and the programs with all that they import at their start."""
    for name in (*LIBRARIES, *(f"megatron.gpt2.programs.{program}" for program in PROGRAMS)):
        importlib.import_module(name)
    gc.freeze()  # what no command collects is not copied for each of them


if __name__ == "__main__":
    preload()
    os._exit(exit_code(serve(sys.argv[1])))
