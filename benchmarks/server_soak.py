#!/usr/bin/env python3
"""The text generation server, asked by many bad clients at once for a long time: it answers the good requests, and its
memory stays flat.

    python benchmarks/server_soak.py                    # 100,000 requests of 64 clients
    python benchmarks/server_soak.py --requests 2000

A tiny model with random weights is served by the program itself. A client completes, streams, asks in Megatron's form
or for scores, goes away in the middle, stalls, or sends garbage, as its seed says. Exit codes: 0 where every good
request had its right answer, the server lives, and its memory grew by no more than 5 %; 1 otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works in a clone that is not installed

import mpu
from benchmarks import report
from megatron.gpt2.model.gpt2 import GPT2Model
from tests.fuzz.mutations import mutate
from tests.fuzz.run_targets import BODY
from tests.megatron.gpt2.generate.test_generation import CONFIG, save

CLIENTS = 64
GROWTH = 0.05
SAMPLES = 20  # of the memory, after each share of the requests, while no request is on its way
WARM = 4  # of them are left out: buffers and connections of a first burst
WAIT = 60.0  # seconds for an answer
STALL = 0.2
PROMPTS = ["Once", "The ", "a", "In a hole"]
HEAD = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n"


class Server:
    """The program in a process of its own, on a free port."""

    def __init__(self, folder: Path) -> None:
        mpu.initialize_model_parallel(1)
        save(GPT2Model(CONFIG).eval(), folder / "tiny")
        mpu.destroy_model_parallel()
        program = report.ROOT / "tools" / "run_text_generation_server.py"
        self.log = folder / "log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    str(program),
                    "--load",
                    str(folder / "tiny"),
                    "--device",
                    "cpu",
                    "--precision",
                    "fp32",
                    "--port",
                    "0",
                    "--max-seconds",
                    "30",
                ],
                stderr=log,
                stdout=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        self.port = 0
        deadline = time.monotonic() + 120
        while not self.port:
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.1)
            if found := re.search(r"http://127\.0\.0\.1:(\d+)/v1", self.log.read_text()):
                self.port = int(found[1])

    def memory(self) -> int:
        """Resident bytes, without pages of files, once nothing is written any more."""
        deadline = time.monotonic() + WAIT
        while self.texts() and time.monotonic() < deadline:
            time.sleep(0.05)
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return 1024 * int(re.search(r"RssAnon:\s+(\d+)", status)[1])  # type: ignore[index]

    def texts(self) -> int:
        """How many are written or wait."""
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT)) as connection:
            connection.request("GET", "/health")
            return int(json.loads(connection.getresponse().read())["texts"])

    def end(self) -> int:
        """Its exit code after SIGTERM."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


class Client:
    """One request, of a kind that its seed chooses. An outcome is a status, "gone" (the client itself left), "closed"
    (the server did), or "wrong"."""

    def __init__(self, port: int, right: dict[str, str]) -> None:
        self.port, self.right = port, right

    def ask(self, seed: int) -> tuple[str, str]:
        """Kind and outcome."""
        chance = random.Random(seed)
        kind: Callable[[random.Random], str] = chance.choice(
            (
                self.good,
                self.good,
                self.streamed,
                self.megatron,
                self.scored,
                self.leaves_early,
                self.leaves_a_stream,
                self.stalls,
                self.changed,
                self.garbage,
                self.elsewhere,
            )
        )
        try:
            return kind.__name__, kind(chance)
        except (OSError, http.client.HTTPException) as error:
            return kind.__name__, "closed" if isinstance(error, (ConnectionError, http.client.HTTPException)) else type(
                error
            ).__name__

    @contextlib.contextmanager
    def posted(
        self, body: bytes, method: str = "POST", address: str = "/v1/completions"
    ) -> Iterator[http.client.HTTPResponse]:
        """The response to a request."""
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT)) as connection:
            connection.request(method, address, body, {"Content-Type": "application/json"})
            yield connection.getresponse()

    def good(self, chance: random.Random) -> str:
        """A request with a known answer, where there is room for it."""
        prompt = chance.choice(PROMPTS)
        with self.posted(json.dumps({"prompt": prompt, "max_tokens": 8, "temperature": 0}).encode()) as response:
            answer = json.loads(response.read())
            if response.status == 200 and answer["choices"][0]["text"] != self.right[prompt]:
                return "wrong"
            return str(response.status)

    def streamed(self, chance: random.Random) -> str:
        """The same answer in parts."""
        prompt = chance.choice(PROMPTS)
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "stream": True}
        with self.posted(json.dumps(body).encode()) as response:
            lines = [line[6:] for line in response.read().decode().splitlines() if line.startswith("data: ")]
            if response.status == 200 and (
                lines[-1] != "[DONE]"
                or self.right[prompt] != "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1])
            ):
                return "wrong"
            return str(response.status)

    def megatron(self, chance: random.Random) -> str:
        """The same answer in Megatron's form, with the prompt."""
        prompt = chance.choice(PROMPTS)
        body = {"prompts": [prompt], "tokens_to_generate": 8, "top_k": 1}
        with self.posted(json.dumps(body).encode(), "PUT", chance.choice(("/api", "/generate"))) as response:
            answer = json.loads(response.read())
            if response.status == 200 and answer["text"] != [prompt + self.right[prompt]]:
                return "wrong"
            return str(response.status)

    def scored(self, chance: random.Random) -> str:
        """The probabilities of a prompt's tokens, as lm-eval asks for them."""
        prompt = chance.choice(PROMPTS)
        body = {"prompt": prompt, "max_tokens": chance.randrange(2), "echo": True, "logprobs": 1, "temperature": 0}
        with self.posted(json.dumps(body).encode()) as response:
            answer = json.loads(response.read())
            if response.status == 200:
                choice = answer["choices"][0]
                found = choice["logprobs"]["token_logprobs"]
                read = answer["usage"]["prompt_tokens"]
                if (
                    not choice["text"].startswith(prompt)
                    or len(found) != read + body["max_tokens"]
                    or found[0] is not None
                    or not all(value <= 0 for value in found[1:])
                ):
                    return "wrong"
            return str(response.status)

    def leaves_a_stream(self, chance: random.Random) -> str:
        """Reads the first part of a long answer."""
        with self.posted(json.dumps({"prompt": "a", "max_tokens": 1000, "stream": True}).encode()) as response:
            response.read(chance.randrange(1, 400))
        return "gone"

    def leaves_early(self, chance: random.Random) -> str:
        """Is gone before there is an answer."""
        body = json.dumps({"prompt": "a", "max_tokens": 1000, "n": 3}).encode()
        with socket.create_connection(("127.0.0.1", self.port), WAIT) as connection:
            connection.sendall(HEAD.format(len(body)).encode() + body)
            time.sleep(chance.random() * 0.05)
        return "gone"

    def stalls(self, chance: random.Random) -> str:
        """Sends a part of a request, waits, and goes away."""
        data = HEAD.format(1000).encode() + b'{"prompt": "a", '
        with socket.create_connection(("127.0.0.1", self.port), WAIT) as connection:
            connection.sendall(data[: chance.randrange(1, len(data))])
            time.sleep(STALL)
        return "gone"

    def changed(self, chance: random.Random) -> str:
        """A body as tests/fuzz changes them."""
        with self.posted(mutate(json.dumps({**BODY, "model": "tiny"}).encode(), chance)) as response:
            response.read()
            return str(response.status)

    def garbage(self, chance: random.Random) -> str:
        """Bytes that are no HTTP, or nearly are."""
        data = (
            chance.randbytes(chance.randrange(1, 4000))
            if chance.random() < 0.5
            else mutate(HEAD.format(10).encode() + b"0123456789", chance)
        )
        with socket.create_connection(("127.0.0.1", self.port), WAIT) as connection:
            connection.sendall(data + b"\r\n\r\n")
            connection.settimeout(STALL)
            try:
                answer = connection.recv(100)
            except TimeoutError:
                return "gone"
        return answer[9:12].decode("ascii", "replace") if answer.startswith(b"HTTP/1.1 ") else "closed"

    def elsewhere(self, chance: random.Random) -> str:
        """Another address or method."""
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT)) as connection:
            connection.request(
                chance.choice(("GET", "POST", "DELETE", "PUT")),
                chance.choice(("/", "/v1/models", "/v1/x", "/health", "/../etc", "/%00")),
            )
            response = connection.getresponse()
            response.read()
            return str(response.status)


def right_answers(port: int) -> dict[str, str]:
    """What the server writes to each prompt while it is alone."""
    client, found = Client(port, {}), {}
    for prompt in PROMPTS:
        with client.posted(json.dumps({"prompt": prompt, "max_tokens": 8, "temperature": 0}).encode()) as response:
            found[prompt] = json.loads(response.read())["choices"][0]["text"]
    return found


def soak(folder: Path, requests: int, clients: int, seed: int) -> dict[str, Any]:
    """Ask `requests` times; the outcomes, and the memory after each share of them."""
    server = Server(folder)
    outcomes: Counter[tuple[str, str]] = Counter()
    memory: list[int] = []
    try:
        right = right_answers(server.port)
        for part in range(SAMPLES):
            seeds = iter(range(seed + requests * part // SAMPLES, seed + requests * (part + 1) // SAMPLES))
            lock = threading.Lock()

            def work(seeds: Iterator[int] = seeds, lock: threading.Lock = lock) -> None:
                client = Client(server.port, right)
                while True:
                    with lock:
                        number = next(seeds, None)
                    if number is None:
                        return
                    found = client.ask(number)
                    with lock:
                        outcomes[found] += 1

            threads = [threading.Thread(target=work) for _ in range(clients)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            memory.append(server.memory())
        alive = right_answers(server.port) == right
    finally:
        code = server.end()
    log = server.log.read_text()
    kinds: dict[str, dict[str, int]] = {}
    for (kind, outcome), count in sorted(outcomes.items()):
        kinds.setdefault(kind, {})[outcome] = count
    later = memory[WARM:]
    return {
        "requests": requests,
        "clients": clients,
        "seed": seed,
        "outcomes": kinds,
        "memory_bytes": memory,
        "growth": round(max(later) / later[0] - 1, 4),
        "alive": alive,
        "exit_code": code,
        "tracebacks": log.count("Traceback"),
    }


def problems(result: dict[str, Any]) -> list[str]:
    """What was not as it should be."""
    found = []
    statuses = Counter[str]()
    for of_kind in result["outcomes"].values():
        statuses.update(of_kind)
    if statuses["wrong"] or statuses["500"] or result["tracebacks"]:
        found.append(
            f"{statuses['wrong']} wrong answers, {statuses['500']} errors of the server's own, "
            f"{result['tracebacks']} tracebacks in its log"
        )
    if not result["outcomes"].get("good", {}).get("200"):
        found.append("no good request was answered")
    if result["growth"] > GROWTH:
        found.append(f"the memory grew by {result['growth']:.1%}")
    if not result["alive"] or result["exit_code"]:
        found.append(f"the server did not live to the end (exit code {result['exit_code']})")
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=100_000, metavar="N")
    parser.add_argument("--clients", type=int, default=CLIENTS, metavar="N")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", metavar="DIR", help="folder of the result (default: benchmarks/results)")
    chosen = parser.parse_args(argv)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        result = {
            **report.header("server soak"),
            **soak(Path(folder), chosen.requests, chosen.clients, chosen.seed),
            "seconds": round(time.monotonic() - start, 1),
        }
    result["problems"] = problems(result)
    report.write((Path(chosen.output) if chosen.output else report.RESULTS) / "server_soak.json", result)
    print(
        f"{report.machine_line(result)}: {chosen.requests:,} requests of {chosen.clients} clients in "
        f"{result['seconds']:,.0f} s; memory {result['growth']:+.1%}; {'; '.join(result['problems']) or 'all well'}"
    )
    return 1 if result["problems"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
