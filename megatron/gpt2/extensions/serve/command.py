"""Serve a trained model: OpenAI's /v1/completions, and a web page, at http://127.0.0.1:5000/

    python tools/run_text_generation_server.py --load checkpoints/gpt2_small
    python tools/run_text_generation_server.py --load checkpoints/gpt2_small --nproc-per-node 2  # share each layer

The first rank serves. Without --host it answers this machine alone. It asks for no password:
docs/how-to/server.md. Needs the extra [serve]. Exit codes: 0 after Ctrl-C or SIGTERM; 2 for bad input.
"""

import argparse
import ipaddress
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import torch

try:
    import uvicorn

    from megatron.gpt2.extensions.serve.app import Service
    from megatron.gpt2.extensions.serve.batching import Batcher
    from megatron.gpt2.extensions.serve.request import Offer
except ImportError as error:
    print(
        f"error: the server needs starlette, uvicorn and pydantic ({error}): pip install -e .[serve]", file=sys.stderr
    )
    sys.exit(2)

from megatron.gpt2.commands.inference import ModelParser, check_shared, open_model
from megatron.gpt2.config.flags import dashed
from megatron.gpt2.device import PRECISIONS
from megatron.gpt2.dist.ranks import Ranks
from megatron.gpt2.dist.run_program import Log, run_program
from megatron.gpt2.generate.generation import Generator
from megatron.gpt2.generate.load_model import LoadedModel
from megatron.gpt2.generate.orders import untimed_group
from megatron.gpt2.model.gpt2 import count_parameters
from megatron.gpt2.monitor.reporting import aligned

GRACE = 2  # seconds that open connections have when the server stops
CONNECTIONS = 512  # beyond which new ones are refused


def arguments(argv: Sequence[str], ranks: Ranks) -> argparse.Namespace:
    """The flags, checked. ValueError where one cannot be."""
    parser = ModelParser(__doc__, precision="auto", model_parallel_size=None)
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="address to listen at (default: 127.0.0.1, for this machine only)",
    )
    parser.add_argument("--port", type=int, default=5000, metavar="N", help="default: 5000; 0: any that is free")
    for flag, default, meant in (
        ("--max-tokens", 1024, "most new tokens of a text"),
        ("--batch-size", 32, "most texts generated together, and most of one request"),
        ("--max-texts", 256, "most texts that are generated or wait; a request for more is refused"),
        ("--max-seconds", 300, "longest time for an answer in seconds, waiting included"),
        ("--max-body-bytes", 1 << 20, "most bytes of a request"),
    ):
        parser.add_argument(flag, type=positive, default=default, metavar="N", help=f"{meant} (default: {default})")
    args = parser.parse_args([dashed(word) for word in argv])
    if not 0 <= args.port < 2**16:
        raise ValueError(f"--port must be from 0 to 65535, not {args.port}")
    if args.max_texts < args.batch_size:
        raise ValueError(f"--max-texts {args.max_texts} must be at least --batch-size, {args.batch_size}")
    check_shared(args, ranks)
    return args


def positive(text: str) -> int:
    """An int of at least 1, for argparse."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    return number


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens at this address. ValueError where that fails."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address, family=family, backlog=CONNECTIONS)
    except OSError as error:
        reason = (error.strerror or str(error)).partition(" (")[0]  # without Python's words
        raise ValueError(f"--host {host} --port {port}: {reason}; --port 0 takes a free one") from None


def serve(argv: Sequence[str], ranks: Ranks, log: Log) -> None:
    """Load the model on every rank and answer clients on the first, until Ctrl-C or SIGTERM."""
    args = arguments(argv, ranks)
    listener = listen(args.host, args.port) if ranks.rank == 0 else None
    loaded = open_model(args, ranks, log)
    if listener is None:
        for number in (signal.SIGINT, signal.SIGTERM):  # all ranks get it, and the first one ends the others
            signal.signal(number, signal.SIG_IGN)
    generator = Generator(loaded.model, loaded.tokenizer, orders=untimed_group())  # which all ranks come to
    if listener is None:
        return generator.follow()
    with generator.leading():
        answer_clients(args, loaded, generator, listener, log)


def answer_clients(
    args: argparse.Namespace, loaded: LoadedModel, generator: Generator, listener: socket.socket, log: Log
) -> None:
    """Answer requests until Ctrl-C or SIGTERM.

    This thread, which gets the signals, owns the generator; another one owns the connections.
    """
    batcher, name = Batcher(args.batch_size), Path(args.load).resolve().name
    offer = Offer(
        name, loaded.tokenizer, generator.limit, args.max_tokens, texts=args.batch_size, body_bytes=args.max_body_bytes
    )
    service = Service(offer, batcher, args.max_texts, args.max_seconds, log)
    server = uvicorn.Server(
        uvicorn.Config(
            service.app(),
            lifespan="off",
            log_config=None,
            log_level="critical",
            timeout_graceful_shutdown=GRACE,
            limit_concurrency=CONNECTIONS,
            http="h11",
            ws="none",
            loop="asyncio",
        )
    )
    connections = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)

    def stop(number: int, frame: object) -> None:
        if number == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)  # a second one ends it at once
        batcher.stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    connections.start()
    print_start(args, loaded, listener, log)
    try:
        batcher.run(generator)
    except torch.OutOfMemoryError as error:
        raise ValueError(f"--batch-size {args.batch_size}: so many texts do not fit into the memory: {error}") from None
    finally:
        server.should_exit = True
        connections.join(2 * GRACE)
    log("stopped")


def print_start(args: argparse.Namespace, loaded: LoadedModel, listener: socket.socket, log: Log) -> None:
    """Print the model, the addresses, and how to end."""
    url, ranks = url_of(listener), args.model_parallel_size * args.pipeline_model_parallel_size
    for line in aligned(
        [
            (
                "model",
                f"{args.load}, iteration {loaded.checkpoint.iteration:,}, "
                f"{count_parameters(loaded.model.config)[0]:,} parameters, {PRECISIONS[loaded.dtype]} on "
                f"{loaded.device.type}, {ranks} rank{'s' * (ranks > 1)}",
            ),
            ("page", f"{url}/"),
            ("OpenAI's base_url", f"{url}/v1"),
            ("to end", "Ctrl-C"),
        ]
    ):
        log(line)
    if notice := notice_of(args.host, listener):
        log(notice)


def url_of(listener: socket.socket) -> str:
    """The address of the server, without a path."""
    host, port, *_ = listener.getsockname()
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def notice_of(host: str, listener: socket.socket) -> str:
    """A notice where other machines can connect, else ""."""
    if ipaddress.ip_address(listener.getsockname()[0]).is_loopback:
        return ""
    return (
        f"notice: --host {host}: whoever reaches this address can use the model; better listen at 127.0.0.1, "
        "behind a proxy that asks for a password"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: this process's); returns the exit code."""
    return run_program(serve, argv)
