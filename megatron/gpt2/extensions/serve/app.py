"""The server's addresses: OpenAI's `/v1/completions` and `/v1/models`, Megatron's `/api` and `/generate`, `/health`,
and the page at `/`."""

import asyncio
import json
import time
import traceback
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from data_utils import Tokenizer
from megatron.gpt2.extensions.serve.answer import Choice, Text
from megatron.gpt2.extensions.serve.batching import Batcher, Job, Stopping
from megatron.gpt2.extensions.serve.request import (
    ApiError,
    CompletionRequest,
    Limits,
    check_model,
    read_megatron_request,
    read_request,
    usage,
)
from megatron.gpt2.generate.generation import Event

PAGE = Path(__file__).with_name("page.html")
# The page brings all it needs, and asks nobody else.
PAGE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:"
)
LAST_WORDS = 1.0  # seconds to send the error that ends an answer: its client may have stopped reading


def json_response(content: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON response in ASCII, since an error repeats a client's own words, which need not be valid text."""
    return Response(json.dumps(content, allow_nan=False), status, headers, "application/json")


def error_response(error: ApiError) -> Response:
    """The answer to a request that failed, in OpenAI's form."""
    # What took too long once would again: OpenAI's client is told not to repeat it.
    headers = {"Retry-After": "1"} if error.status == 503 else {"x-should-retry": "false"}
    return json_response(error.json(), error.status, headers)


@dataclass
class Service:
    """What the addresses share. All of it is used by the thread of the event loop alone.

    model: its name. context: tokens that it reads. texts: most texts that may be generated or wait at once. seconds:
    time for a request's body, and from its last byte to the last byte of the answer. log: takes a line for each
    request.
    """

    model: str
    tokenizer: Tokenizer
    context: int
    batcher: Batcher
    limits: Limits
    texts: int
    seconds: float
    log: Callable[[str], None]
    started: int = field(default_factory=lambda: int(time.time()))
    admitted: int = 0  # texts that are written or wait

    def app(self) -> Starlette:
        """The application with all addresses."""
        return Starlette(
            routes=[
                Route("/", self.page),
                Route("/health", self.health),
                Route("/v1/models", self.models),
                Route("/v1/models/{name:path}", self.model_of_name),
                Route("/v1/completions", self.completions, methods=["POST"]),
                Route("/api", self.megatron, methods=["PUT"]),
                Route("/generate", self.megatron, methods=["PUT"]),
            ],
            exception_handlers={ApiError: _refuse, HTTPException: _refuse_http, Exception: _fail},
        )

    async def page(self, request: Request) -> Response:
        """GET /: the page for people."""
        return Response(PAGE.read_bytes(), media_type="text/html", headers={"Content-Security-Policy": PAGE_POLICY})

    async def health(self, request: Request) -> Response:
        """GET /health: that the server runs, and how many texts it writes or queues."""
        return json_response({"status": "ok", "texts": self.admitted})

    async def models(self, request: Request) -> Response:
        """GET /v1/models: the one model, in OpenAI's form."""
        return json_response({"object": "list", "data": [self._model()]})

    async def model_of_name(self, request: Request) -> Response:
        """GET /v1/models/NAME: the one model. ApiError for another name."""
        check_model(request.path_params["name"], self.model)
        return json_response(self._model())

    def _model(self) -> dict[str, Any]:
        return {
            "id": self.model,
            "object": "model",
            "created": self.started,
            "owned_by": "local",
            "max_model_len": self.context,
            "max_tokens": self.limits.max_tokens,
        }

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions: texts, at once or streamed. ApiError where the request cannot be served."""
        return await self._complete(request, read_request)

    async def megatron(self, request: Request) -> Response:
        """PUT /api, PUT /generate: texts in Megatron's form. ApiError where the request cannot be served."""
        return await self._complete(request, read_megatron_request)

    async def _complete(self, request: Request, read: Callable[..., CompletionRequest]) -> Response:
        # A page of another site may send a form or plain text without asking, but not this.
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise ApiError("send the header Content-Type: application/json", status=415)
        body = await self._body(request)
        wanted = await run_in_threadpool(
            read, body, model=self.model, tokenizer=self.tokenizer, context=self.context, limits=self.limits
        )
        count = len(wanted.prompts) * wanted.n
        if self.admitted + count > self.texts:
            raise ApiError(
                f"{self.admitted} texts are being written or wait, and {self.texts} may be: try again later", status=503
            )
        return Completion(self, wanted, f"{request.client.host if request.client else '?'} {request.url.path}")

    async def _body(self, request: Request) -> bytes:
        too_large = ApiError(f"the body is larger than {self.limits.body_bytes} bytes", status=413)
        if int(request.headers.get("content-length", 0)) > self.limits.body_bytes:
            raise too_large
        body = bytearray()
        with anyio.move_on_after(self.seconds):
            async for part in request.stream():
                body += part
                if len(body) > self.limits.body_bytes:
                    raise too_large
            return bytes(body)
        raise ApiError(f"the body took longer than {self.seconds:g} seconds", status=408)


class Completion(Response):
    """The answer to a request, at once or streamed. Its texts end when the client goes away."""

    def __init__(self, service: Service, request: CompletionRequest, origin: str) -> None:
        self.service, self.request, self.origin = service, request, origin
        self.started = time.monotonic()
        self.texts = [Text(c) for c in request.continuations()]
        self.head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": service.model,
        }
        service.admitted += len(self.texts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        outcome, self._began = "the client went away", False
        try:
            with anyio.move_on_after(self.service.seconds) as deadline:
                async with anyio.create_task_group() as group:
                    group.start_soon(_leave_with_the_client, receive, group.cancel_scope)
                    outcome = await self._answer(scope, receive, send)
                    group.cancel_scope.cancel()
            if deadline.cancelled_caught:
                outcome = f"ended after {self.service.seconds:g} seconds"
                with anyio.move_on_after(LAST_WORDS):
                    await self._end(
                        ApiError(
                            f"the answer took longer than {self.service.seconds:g} seconds: ask for fewer tokens",
                            status=504,
                        ),
                        scope,
                        receive,
                        send,
                    )
        finally:
            self.service.admitted -= len(self.texts)
            for text in self.texts:
                text.c.cancel()
            seconds = time.monotonic() - self.started
            tokens = usage(self.request, self.texts)
            self.service.log(
                f"{self.origin}: {tokens['prompt_tokens']} + {tokens['completion_tokens']} tokens in "
                f"{seconds:.2f} s, {outcome}"
            )

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> str:
        """Gives the outcome for the log."""
        uncounted = {"usage": None} if self.request.include_usage else {}
        try:
            if self.request.stream:
                async for chunk in self._chunks():
                    await self._event({**self.head, "choices": [chunk]} | uncounted, send)
            else:
                async for number, event in self._events():
                    self.texts[number].events.append(event)
        except ApiError as error:
            await self._end(error, scope, receive, send)
            return str(error)
        if self.request.stream:
            if self.request.include_usage:
                await self._event({**self.head, "choices": [], "usage": usage(self.request, self.texts)}, send)
            await self._write("[DONE]", send, more=False)
        else:
            answer = await run_in_threadpool(self.request.answer, self.texts, self.service.tokenizer, self.head)
            await json_response(answer)(scope, receive, send)
        return "done"

    async def _chunks(self) -> AsyncIterator[dict[str, Any]]:
        """Choices in OpenAI's form, as they come."""
        choices = [
            Choice(number, self.service.tokenizer, logprobs=self.request.logprobs) for number in range(len(self.texts))
        ]
        unread = set(range(len(choices))) if self.request.echo else set()
        async for number, event in self._events():
            if number in unread:
                unread.remove(number)
                yield choices[number].echo(self.request.prompts[number // self.request.n].text, self.texts[number].c)
            chunk = choices[number].add(event)
            if event.finish or chunk["text"]:
                yield chunk

    async def _events(self) -> AsyncIterator[tuple[int, Event]]:
        """What the texts become: the number of a text, and its next event. ApiError where the server stops."""
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[tuple[int, Event | Stopping]] = asyncio.Queue()

        def deliver(*event: Any) -> None:
            loop.call_soon_threadsafe(events.put_nowait, event)

        self.service.batcher.submit(Job([text.c for text in self.texts], deliver))
        running = len(self.texts)
        while running:
            number, event = await events.get()
            if isinstance(event, Stopping):
                raise ApiError("the server is stopping", status=503)
            running -= bool(event.finish)
            yield number, event

    async def _event(self, content: dict[str, Any], send: Send) -> None:
        await self._write(json.dumps(content, allow_nan=False), send, more=True)

    async def _write(self, data: str, send: Send, *, more: bool) -> None:
        """A server-sent event; the first brings the headers."""
        if not self._began:
            self._began = True
            await send(
                {
                    "type": "http.response.start",
                    "status": 200,
                    "headers": [
                        (b"content-type", b"text/event-stream"),
                        (b"cache-control", b"no-store"),
                        (b"x-accel-buffering", b"no"),
                    ],
                }
            )  # the last is for nginx
        await send({"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": more})

    async def _end(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        if self._began:
            await self._write(json.dumps(error.json()), send, more=False)
        else:
            await error_response(error)(scope, receive, send)


async def _leave_with_the_client(receive: Receive, scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def _refuse_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return error_response(ApiError(f"{request.method} {request.url.path}: {error.detail}", status=error.status_code))


async def _fail(request: Request, error: Exception) -> Response:
    if not isinstance(error, ClientDisconnect):
        traceback.print_exception(error)
    return error_response(ApiError("an error of the server's own; its log says more", status=500))
