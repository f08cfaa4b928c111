"""Serve a trained model: OpenAI's /v1/completions, and a web page, at http://127.0.0.1:5000/

    python tools/run_text_generation_server.py --load checkpoints/gpt2_small
    python tools/run_text_generation_server.py --load checkpoints/gpt2_small --nproc-per-node 2  # share each layer

The first rank serves. Without --host, only this machine can connect. The server does not check passwords, see
docs/how-to/server.md. The program needs the extra [serve]. Exit codes: 0 after Ctrl-C or SIGTERM; 2 for bad input.
"""

import argparse
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import torch

from data_utils.command_line import Log, missing_package, positive_int, require

try:
    from megatron.gpt2.extensions.serve.app import Service
    from megatron.gpt2.extensions.serve.batching import Batcher
    from megatron.gpt2.extensions.serve.connections import CONNECTIONS, GRACE, build_server
    from megatron.gpt2.extensions.serve.request import ServedModel
except ImportError as error:
    print(f"error: {missing_package('the server', error.name, 'serve')}", file=sys.stderr)
    sys.exit(2)

from megatron.gpt2.commands.inference import ModelParser, open_model_from_flags
from megatron.gpt2.config.flags import with_dashes
from megatron.gpt2.device import PRECISIONS
from megatron.gpt2.dist.ranks import RankInfo
from megatron.gpt2.dist.run_program import run_program
from megatron.gpt2.generate.generation import Generator
from megatron.gpt2.generate.load_model import LoadedModel
from megatron.gpt2.generate.model_runner import new_command_group
from megatron.gpt2.monitor.log_lines import align_rows


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """Parse and check the flags. Raises ValueError if a flag is invalid."""
    parser = ModelParser(__doc__, scores=False)
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="address to listen at (default: 127.0.0.1, for this machine only)",
    )
    parser.add_argument("--port", type=int, default=5000, metavar="N", help="default: 5000; 0: any free port")
    parser.add_argument(
        "--allowed-hosts",
        nargs="+",
        default=[],
        metavar="NAME",
        help="names under which clients may address this server, in addition to addresses, localhost, --host and this "
        "machine's name; a proxy may send its own name",
    )
    for flag, default, meant in (
        ("--max-tokens", 1024, "limit of new tokens of a text"),
        ("--batch-size", 32, "limit of texts that are generated together, and of texts of one request"),
        ("--max-texts", 256, "limit of running and waiting texts; further requests are refused"),
        ("--max-seconds", 300, "time limit for an answer in seconds, including waiting"),
        ("--max-body-bytes", 1 << 20, "limit of bytes of a request"),
    ):
        parser.add_argument(flag, type=positive_int, default=default, metavar="N", help=f"{meant} (default: {default})")
    args = parser.parse_args([with_dashes(word) for word in argv])
    require(0 <= args.port < 2**16, f"--port must be from 0 to 65535, not {args.port}")
    require(
        args.max_texts >= args.batch_size,
        f"--max-texts {args.max_texts} must be at least --batch-size, {args.batch_size}",
    )
    return args


def listen(host: str, port: int) -> socket.socket:
    """Open a socket that listens at this address. Raises ValueError if the address is unknown or in use."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address, family=family, backlog=CONNECTIONS)
    except OSError as error:
        reason = (error.strerror or str(error)).partition(" (")[0]  # without Python's addition
        raise ValueError(f"--host {host} --port {port}: {reason}; use --port 0 for a free port") from None


def serve(argv: Sequence[str], rank_info: RankInfo, log: Log) -> None:
    """Load the model on every rank, and answer clients on the first rank until Ctrl-C or SIGTERM."""
    args = parse_args(argv)
    listener = listen(args.host, args.port) if rank_info.rank == 0 else None
    loaded = open_model_from_flags(args, rank_info, log)
    if listener is None:
        for number in (signal.SIGINT, signal.SIGTERM):
            # All ranks get the signals, but the first rank ends all other ranks.
            signal.signal(number, signal.SIG_IGN)
    generator = Generator(loaded.model, loaded.tokenizer, group=new_command_group())  # All ranks must create the group.
    if listener is None:
        return generator.execute_commands()
    with generator.driving():
        run_server(args, loaded, generator, listener, log)


def run_server(
    args: argparse.Namespace, loaded: LoadedModel, generator: Generator, listener: socket.socket, log: Log
) -> None:
    """Answer requests until Ctrl-C or SIGTERM.

    The calling thread handles signals and generates text. A second thread handles the connections.
    """
    batcher, name = Batcher(args.batch_size), Path(args.load).resolve().name
    served = ServedModel(
        name,
        loaded.tokenizer,
        generator.limit,
        args.max_tokens,
        max_texts=args.batch_size,
        max_body_bytes=args.max_body_bytes,
    )
    allowed_hosts = [args.host, socket.gethostname(), *args.allowed_hosts]
    service = Service(served, batcher, args.max_texts, args.max_seconds, log, allowed_hosts)
    server = build_server(service.app())
    connections = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)

    def stop(number: int, frame: object) -> None:
        if number == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)  # A second Ctrl-C ends the process immediately.
        batcher.stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    connections.start()
    host, port, *_ = listener.getsockname()
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    iteration, precision = loaded.checkpoint.iteration, PRECISIONS[loaded.dtype]
    model = f"{args.load}, iteration {iteration:,}, {precision} on {loaded.device.type}"
    rows = [("model", model), ("page", f"{url}/"), ("OpenAI's base_url", f"{url}/v1"), ("to end", "Ctrl-C")]
    log("\n".join(align_rows(rows)))
    try:
        batcher.run(generator)
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"--batch-size {args.batch_size}: not enough memory for this number of texts, make it smaller: {error}"
        ) from None
    finally:
        server.should_exit = True
        connections.join(2 * GRACE)
    log("stopped")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: sys.argv[1:]). Return the exit code."""
    return run_program(serve, argv)
