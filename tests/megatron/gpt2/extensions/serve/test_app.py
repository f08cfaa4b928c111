"""The server runs in the test process and gets requests of OpenAI's client and of invalid clients."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch

import mpu
from data_utils import Tokenizer
from megatron.gpt2.generate import model_runner
from megatron.gpt2.generate.generation import GenerationRequest, Generator, generate
from megatron.gpt2.generate.sampling import SamplingParams
from megatron.gpt2.model.gpt2 import GPT2Model
from tests.conftest import needs
from tests.megatron.gpt2.dist.started_ranks import wait_until
from tests.megatron.gpt2.generate.test_generation import CONFIG, TOKENIZER, end_at_once, endless

if TYPE_CHECKING:
    import openai

for library in ("starlette", "uvicorn"):
    pytest.importorskip(library, reason=f"{library} is not installed: the extra [serve] brings it")

from megatron.gpt2.extensions.serve import app, connections  # noqa: E402
from megatron.gpt2.extensions.serve.app import Service  # noqa: E402
from megatron.gpt2.extensions.serve.batching import Batcher  # noqa: E402
from megatron.gpt2.extensions.serve.request import (  # noqa: E402
    ApiError,
    CompletionRequest,
    ServedModel,
    read_megatron_request,
    read_request,
    token_name,
)

pytestmark = needs("openai", extra="dev")

ENDLESS = {"max_tokens": 100_000, "top_k": 3}  # The fixture `model` never ends a text with top_k 3.
SERVED = ServedModel("tiny", TOKENIZER, context=32, max_tokens=100_000, max_texts=32, max_body_bytes=1 << 16)
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def model() -> Iterator[GPT2Model]:
    mpu.initialize_model_parallel(1)
    yield endless(GPT2Model(CONFIG))
    mpu.destroy_model_parallel()


def openai_client(url: str) -> openai.OpenAI:
    """Return OpenAI's client for the server at `url`."""
    import openai  # imported late, because the import is slow and most test processes do not need openai

    return openai.OpenAI(base_url=f"{url}v1", api_key="none", max_retries=0, timeout=240)


@dataclasses.dataclass
class RunningServer:
    port: int
    log: list[str]

    @property
    def client(self) -> openai.OpenAI:
        return openai_client(f"http://127.0.0.1:{self.port}/")

    def ask(self, prompt: Any = "Once", **settings: Any) -> Any:
        return self.client.completions.create(model="tiny", prompt=prompt, **settings)

    def send(self, method: str, path: str, body: Any = None, headers: Any = JSON) -> tuple[int, Any]:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=240)) as connection:
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            return response.status, json.loads(response.read())

    def wait_until(self, texts: int) -> None:
        """Wait until `texts` texts are running or queued. A text whose client disconnected must not count."""
        wait_until(lambda: self.send("GET", "/health")[1]["texts"] == texts)


@contextlib.contextmanager
def serving(
    model: GPT2Model, tokenizer: Tokenizer = TOKENIZER, *, texts: int = 64, seconds: float = 60.0
) -> Iterator[RunningServer]:
    log: list[str] = []
    batcher = Batcher(SERVED.max_texts)
    service = Service(SERVED._replace(tokenizer=tokenizer), batcher, texts, seconds, log.append, ["Gpt2.example"])
    listener = socket.create_server(("127.0.0.1", 0))
    server = connections.build_server(service.app())
    threads = [
        threading.Thread(target=batcher.run, args=[Generator(model, tokenizer)]),
        threading.Thread(target=server.run, kwargs={"sockets": [listener]}),
    ]
    for thread in threads:
        thread.start()
    try:
        yield RunningServer(listener.getsockname()[1], log)
    finally:
        batcher.stop()
        threads[0].join()
        server.should_exit = True
        threads[1].join()


@pytest.fixture(scope="module")
def served(model: GPT2Model) -> Iterator[RunningServer]:
    with serving(model) as served:
        yield served


def generate_ids(model: GPT2Model, prompt: str, **settings: Any) -> list[int]:
    """Generate the new token ids of one prompt without the server."""
    request = GenerationRequest(TOKENIZER.encode(prompt), SamplingParams(**settings))
    generate(model, TOKENIZER, [request])
    return request.ids


def test_openai_client(served: RunningServer, model: GPT2Model):
    answer = served.ask(max_tokens=40, temperature=0, logprobs=3)
    ids = generate_ids(model, "Once", max_new_tokens=40, temperature=0)
    choice = answer.choices[0]
    assert choice.text == TOKENIZER.decode(ids) and choice.finish_reason == ("length" if len(ids) == 40 else "stop")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, len(ids))
    assert choice.logprobs.tokens == [token_name(TOKENIZER, i) for i in ids]
    for name, likeliest in zip(choice.logprobs.tokens, choice.logprobs.top_logprobs, strict=True):
        assert len(likeliest) == 3 and max(likeliest.values()) == likeliest[name], "greedy takes the likeliest"
    [entry] = served.client.models.list()
    assert entry.id == "tiny" and served.client.models.retrieve("tiny") == entry


def test_echo_with_logprobs(served: RunningServer, model: GPT2Model, monkeypatch: pytest.MonkeyPatch):
    """With `echo` and `logprobs`, the server scores the prompt. The answer also has the model's most likely tokens."""
    monkeypatch.setattr(model_runner, "ROWS", 7)  # The last prompt is scored in two parts.
    prompts = ["One é", "a longer text"]
    asked = [list(prompt.encode()) for prompt in prompts]
    answer = served.ask(asked, max_tokens=9, logprobs=2, echo=True, temperature=0)
    for prompt, ids, choice in zip(prompts, asked, answer.choices, strict=True):
        n, found = len(ids), choice.logprobs
        assert len(found.tokens) == n + 9 == len(found.text_offset)
        assert found.tokens[:n] == [token_name(TOKENIZER, i) for i in ids]
        assert found.text_offset[:n] == [min(i, len(prompt) - 1) for i in range(n)]
        assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
        with torch.inference_mode():
            logits = model(torch.tensor([ids]))[:, 0, : TOKENIZER.vocab_size].log_softmax(-1)
        for i in range(1, n):
            expected = {token_name(TOKENIZER, j): float(logits[i - 1, j]) for j in (*logits[i - 1].topk(2)[1], ids[i])}
            assert found.top_logprobs[i] == pytest.approx(expected, abs=1e-5)
            assert found.token_logprobs[i] == found.top_logprobs[i][found.tokens[i]]
    assert served.ask("", echo=True, max_tokens=0, logprobs=0).choices[0].logprobs.tokens == []


@pytest.mark.usefixtures("model")  # The fixture initializes the model-parallel groups.
def test_the_end_of_a_document_is_listed() -> None:
    """lm-eval requests one new token and ignores the last log-probability, so an end of the document must be listed,
    too."""
    with serving(end_at_once(GPT2Model(CONFIG))) as served:
        [choice] = served.ask("One", echo=True, logprobs=1, max_tokens=1).choices
        assert choice.text == "One" and choice.finish_reason == "stop"
        assert choice.logprobs.tokens == ["O", "n", "e", "<|endoftext|>"] and choice.logprobs.text_offset[3] == 3


def test_megatrons_form(served: RunningServer, model: GPT2Model):
    def put(address: str, **fields: Any) -> Any:
        return served.send("PUT", address, json.dumps(fields))[1]

    prompts, columns = ["Once é", "a"], ("text", "tokens", "segments", "logprobs")
    answer = put("/api", prompts=prompts, tokens_to_generate=12, random_seed=5, logprobs=True)
    for prompt, text, tokens, segments, logprobs in zip(prompts, *map(answer.get, columns), strict=True):
        ids = [*prompt.encode(), *generate_ids(model, prompt, max_new_tokens=12, seed=5)]
        assert text == TOKENIZER.decode(ids) and tokens == ids
        assert segments == [TOKENIZER.decode([i]) for i in ids]
        scored = served.ask(ids, max_tokens=0, echo=True, logprobs=0).choices[0].logprobs
        assert logprobs == pytest.approx(scored.token_logprobs[1:], abs=1e-5)
    begun = put("/generate", prompts=[""], add_BOS=True, tokens_to_generate=1, logprobs=True, random_seed=1)
    assert begun["segments"][0][0] == "<|endoftext|>" and len(begun["logprobs"][0]) == 1
    text = put("/api", prompts=["a"], random_seed=3, stop_on_eol=True, tokens_to_generate=2000)["text"][0]
    assert text.endswith("\n") and text.count("\n") == 1
    assert served.send("POST", "/api", "{}")[0] == 405


def test_a_stream_is_the_same_text(served: RunningServer):
    settings: dict[str, Any] = {"max_tokens": 60, "seed": 5, "n": 2, "logprobs": 2, "stop": ["e", "zz"]}
    whole = served.ask(["One", "Two"], **settings)
    chunks = list(served.ask(["One", "Two"], stream=True, stream_options={"include_usage": True}, **settings))
    assert chunks[-1].usage == whole.usage and len({choice.text for choice in whole.choices}) == 4
    for choice in whole.choices:
        parts = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
        assert choice.text == "".join(part.text for part in parts)
        assert choice.logprobs.tokens == [token for part in parts for token in part.logprobs.tokens]
        assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + [choice.finish_reason]


def test_errors_have_openais_form(served: RunningServer):
    import openai

    with pytest.raises(
        openai.BadRequestError, match="max_tokens: Input should be greater than or equal to 0, not -5"
    ) as e:
        served.ask(max_tokens=-5)
    assert (e.value.param, e.value.type) == ("max_tokens", "invalid_request_error")
    with pytest.raises(openai.NotFoundError, match="'tiny'") as unknown:
        served.client.models.retrieve("a/b")
    assert unknown.value.code == "model_not_found"


def post_request(length: int, body: bytes) -> bytes:
    """Return an HTTP request, which is incomplete if `body` is shorter than `length`."""
    return (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%b" % (length, body)
    )


def test_bad_clients_leave_it_serving(served: RunningServer, monkeypatch: pytest.MonkeyPatch):
    text = served.ask(seed=1).choices[0].text
    for body in b'{"prompt": "\xff"}', b"[" * 10_000:
        status, answer = served.send("POST", "/v1/completions", body)
        assert status == 400 and "the body: Invalid JSON" in answer["message"]
    assert served.send("POST", "/v1/completions", "{}", {})[0] == 415
    assert served.send("POST", "/v1/completions", (bytes(1_000_000) for _ in range(100)))[0] == 413, "in chunks"
    assert served.send("GET", "/v1/completions")[0] == 405 and served.send("GET", "/nowhere")[0] == 404
    for request in b"\0\xff" * 500, post_request(60, b"{"):
        with socket.create_connection(("127.0.0.1", served.port)) as connection:
            connection.sendall(request)
    monkeypatch.setattr(app, "BODY_SECONDS", 0.1)
    with socket.create_connection(("127.0.0.1", served.port), timeout=5) as connection:
        connection.sendall(post_request(60, b"{"))
        answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
        assert answer.startswith(b"HTTP/1.1 408") and b"the body took longer than 0.1 seconds" in answer
    monkeypatch.undo()
    assert served.ask(seed=1).choices[0].text == text


KNOWN = "LOCALHOST.:80 127.0.0.1:5000 [::1] 192.0.2.7 gpt2.EXAMPLE:80".split()
UNKNOWN = """other.example 127.0.0.1.other.example [::1 other.example:127.0.0.1 localhost@other.example
    x.gpt2.example""".split()


@pytest.mark.parametrize("host", [*KNOWN, *UNKNOWN, "", "a b"])
def test_only_known_hosts(served: RunningServer, host: str):
    """A request from a page of a different site has the name of that site as Host, even if the name resolves to
    127.0.0.1."""
    found, answer = served.send("GET", "/health", headers={"Host": host})
    assert found == 200 if host in KNOWN else found == 403 and "--allowed-hosts" in answer["message"]


SLOW = [
    b"G",
    post_request(60, b"{"),  # The client never sends the whole body of its request.
    b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n",
    # The server answers the request /health. Then `is_open` sends the headers of a second request, byte by byte.
    b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
]


def is_open(client: socket.socket) -> bool:
    """Send a byte, read what has arrived, and return whether the server has kept the connection."""
    try:
        client.send(b"x")
        return bool(client.recv(1 << 16, socket.MSG_DONTWAIT))
    except OSError as error:
        return isinstance(error, BlockingIOError)


def test_slow_connections_end_and_keep_nobody_out(model: GPT2Model, monkeypatch: pytest.MonkeyPatch):
    """600 connections, more than the server accepts, send a byte now and then."""
    monkeypatch.setattr(connections, "IDLE_SECONDS", 1.0)
    monkeypatch.setattr(app, "BODY_SECONDS", 1.0)
    with serving(model) as served, contextlib.ExitStack() as opened:
        text = served.ask(seed=1).choices[0].text
        clients = []
        for number in range(600):
            clients.append(opened.enter_context(socket.create_connection(("127.0.0.1", served.port))))
            clients[-1].sendall(SLOW[number % len(SLOW)])
        deadline = time.monotonic() + 60
        while clients := list(filter(is_open, clients)):
            assert time.monotonic() < deadline, f"still open: {len(clients)}"
            assert served.ask(seed=1).choices[0].text == text
            time.sleep(0.5)
        # A client that sends requests and does not read the answers is disconnected.
        flood = opened.enter_context(socket.create_connection(("127.0.0.1", served.port), timeout=20))
        with pytest.raises(ConnectionError):
            while True:
                flood.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1000)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_ends_its_text(served: RunningServer, stream: bool):
    body = json.dumps({"prompt": "Once", "n": 3, "stream": stream, **ENDLESS}).encode()
    with socket.create_connection(("127.0.0.1", served.port)) as connection:
        connection.sendall(post_request(len(body), body))
        if stream:
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
        served.wait_until(texts=3)
    served.wait_until(texts=0)
    assert "the client went away" in served.log[-1]
    assert served.ask(max_tokens=2, seed=1).choices[0].text


def test_too_many_texts_and_too_much_time(model: GPT2Model):
    import openai

    with ThreadPoolExecutor(1) as clients, serving(model, texts=40) as served:
        clients.submit(served.ask, "Once", n=30, extra_body=ENDLESS)
        served.wait_until(texts=30)
        with pytest.raises(openai.InternalServerError, match="try again later") as refused:
            served.ask(n=11)
        assert refused.value.status_code == 503
    with serving(model, texts=40, seconds=1.0) as served:
        with pytest.raises(openai.InternalServerError, match="took longer than 1 seconds") as late:
            served.ask(n=30, extra_body=ENDLESS)
        assert late.value.status_code == 504
        served.wait_until(texts=0)


# The first field of each request is invalid, and the error must name that field. pydantic checks types and ranges.
BAD = [
    *map(json.loads, """{"max_tokens": 1000000000}
{"max_tokens": 1.5}
{"n": 33}
{"temperature": NaN}
{"temperature": 1e-9}
{"top_p": 1.01}
{"stop": ""}
{"echo": 1}
{"stream_options": {"include_usage": true}}
{"stream_options": {"x": 1}, "stream": true}
{"best_of": 2}
{"logit_bias": {"50256": -100}}
{"functions": []}
{"prompt": 0}
{"prompt": []}
{"prompt": [257]}
{"prompt": [true]}
{"prompt": ["a", 1]}
{"model": "gpt-4"}""".splitlines()),
    {"stop": ["a"] * 17},
    {"prompt": ["a"] * 17, "n": 2},
    {"prompt": "x" * 33},
    {"prompt": [[1] * 33]},
    {"prompt": "x" * 10**6},
]  # fmt: skip
BAD_FOR_MEGATRON = [
    *map(json.loads, """{"prompts": null}
{"prompts": "a"}
{"prompts": [""]}
{"max_len": 9}
{"beam_width": 2}
{"tokens_to_generate": 0}
{"tokens_to_generate": 1000000000}
{"temperature": 0}
{"top_p": 0.5, "top_k": 2}
{"top_p_decay": 0.9, "top_p": 0.5}
{"top_p_bound": 0.6, "top_p": 0.5}
{"stop_token": 10}
{"n": 2}""".splitlines()),
    {"prompts": ["a"] * 33},
    {"prompts": ["x" * 32], "add_BOS": True},
]  # fmt: skip


def read(fields: dict[str, Any]) -> CompletionRequest:
    own = read_megatron_request if "prompts" in fields else read_request
    return own(json.dumps(fields).encode(), SERVED)


@pytest.mark.parametrize(
    "good, bad",
    [
        *(({"prompt": "Once"}, bad) for bad in BAD),
        *(({"prompts": ["Once"]}, bad) for bad in BAD_FOR_MEGATRON),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_bad_field_is_named(good: dict[str, Any], bad: dict[str, Any]):
    with pytest.raises(ApiError) as refused:
        read({**good, **bad})
    param = next(iter(bad))
    assert refused.value.param == param and 10 < len(str(refused.value)) < 300
    assert refused.value.status == (404 if param == "model" else 400)


def test_accepted_fields() -> None:
    request = read({"prompt": ["a", "a"], "n": 2, "seed": 2**63 - 1, "user": "me", "best_of": 1, "suffix": None})
    assert [text.c.sampling.seed for text in request.texts] == [2**63 - 1, -(2**63)] * 2
    assert read({"top_p": 0, "top_k": 9}).texts[0].c.sampling.top_k == 1, "only the likeliest"
    least = read_request(b"{}", SERVED._replace(max_tokens=8))
    assert least.texts[0].c.sampling.max_new_tokens == 8, "the default must be within the limits"
    # Megatron's fields that have no effect here, and its stop strings
    unused = {"beam_width": None, "top_p_decay": 0.0, "length_penalty": 1.0, "stop_token": 256, "no_log": True}
    [text] = read({"prompts": ["a"], "stop_on_eol": True, "stop_on_double_eol": True, **unused}).texts
    assert text.c.sampling.stop == ("\n\n",)
