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

from megatron.gpt2.extensions.serve.batching import Batcher, Job, Stopping
from megatron.gpt2.extensions.serve.request import (
    ApiError,
    Choice,
    CompletionRequest,
    Offer,
    Text,
    read_megatron_request,
    read_request,
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
    """What the addresses share. All of it is used by the thread of the event loop only.

    texts: most texts that may be generated or wait at once. seconds: time for a request's body, and from its last byte
    to the last byte of the answer. log: takes a line for each request.
    """

    offer: Offer
    batcher: Batcher
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
            exception_handlers={ApiError: _refuse, HTTPException: _refuse, Exception: _fail},
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
        self.offer.check_model(request.path_params["name"])
        return json_response(self._model())

    def _model(self) -> dict[str, Any]:
        return {
            "id": self.offer.model,
            "object": "model",
            "created": self.started,
            "owned_by": "local",
            "max_model_len": self.offer.context,
            "max_tokens": self.offer.max_tokens,
        }

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions: texts, at once or streamed. ApiError where the request cannot be served."""
        return await self._complete(request, read_request)

    async def megatron(self, request: Request) -> Response:
        """PUT /api, PUT /generate: texts in Megatron's form. ApiError where the request cannot be served."""
        return await self._complete(request, read_megatron_request)

    async def _complete(self, request: Request, read: Callable[[bytes, Offer], CompletionRequest]) -> Response:
        # A page of another site may send a form or plain text without asking, but not this.
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise ApiError("send the header Content-Type: application/json", status=415)
        body = await self._body(request)
        wanted = await run_in_threadpool(read, body, self.offer)
        count = len(wanted.prompts) * wanted.n
        if self.admitted + count > self.texts:
            raise ApiError(
                f"{self.admitted} texts are being written or wait, and {self.texts} may be: try again later", status=503
            )
        return Completion(self, wanted, f"{request.client.host if request.client else '?'} {request.url.path}")

    async def _body(self, request: Request) -> bytes:
        too_large = ApiError(f"the body is larger than {self.offer.body_bytes} bytes", status=413)
        if int(request.headers.get("content-length", 0)) > self.offer.body_bytes:
            raise too_large
        body = bytearray()
        with anyio.move_on_after(self.seconds):
            async for part in request.stream():
                body += part
                if len(body) > self.offer.body_bytes:
                    raise too_large
            return bytes(body)
        raise ApiError(f"the body took longer than {self.seconds:g} seconds", status=408)


class Completion(Response):
    """The answer to a request, at once or streamed. Its texts end when the client goes away."""

    def __init__(self, service: Service, request: CompletionRequest, origin: str) -> None:
        self.service, self.request, self.origin = service, request, origin
        self.started, self._began = time.monotonic(), False
        self.texts = [Text(c) for c in request.continuations()]
        self.head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": service.offer.model,
        }
        service.admitted += len(self.texts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._client = scope, receive, send
        outcome, limit = "the client went away", self.service.seconds
        try:
            with anyio.move_on_after(limit) as deadline:
                async with anyio.create_task_group() as group:
                    group.start_soon(_leave_with_the_client, receive, group.cancel_scope)
                    outcome = await self._answer()
                    group.cancel_scope.cancel()
            if deadline.cancelled_caught:
                outcome = f"ended after {limit:g} seconds"
                late = f"the answer took longer than {limit:g} seconds: ask for fewer tokens"
                with anyio.move_on_after(LAST_WORDS):
                    await self._end(ApiError(late, status=504))
        finally:
            self.service.admitted -= len(self.texts)
            for text in self.texts:
                text.c.cancel()
            seconds, tokens = time.monotonic() - self.started, self.request.usage(self.texts)
            self.service.log(
                f"{self.origin}: {tokens['prompt_tokens']} + {tokens['completion_tokens']} tokens in "
                f"{seconds:.2f} s, {outcome}"
            )

    async def _answer(self) -> str:
        """Gives the outcome for the log."""
        request = self.request
        try:
            if request.stream:
                uncounted = {"usage": None} if request.include_usage else {}
                async for chunk in self._chunks():
                    await self._event({**self.head, "choices": [chunk], **uncounted})
            else:
                async for number, event in self._events():
                    self.texts[number].events.append(event)
        except ApiError as error:
            await self._end(error)
            return str(error)
        if request.stream:
            if request.include_usage:
                await self._event({**self.head, "choices": [], "usage": request.usage(self.texts)})
            await self._write("[DONE]", more=False)
        else:
            answer = await run_in_threadpool(request.answer, self.texts, self.service.offer.tokenizer, self.head)
            await json_response(answer)(*self._client)
        return "done"

    async def _chunks(self) -> AsyncIterator[dict[str, Any]]:
        """Choices in OpenAI's form, as they come."""
        request, choices = self.request, dict[int, Choice]()
        async for number, event in self._events():
            if number not in choices:
                choices[number] = Choice(number, self.service.offer.tokenizer, logprobs=request.logprobs)
                if request.echo:
                    yield choices[number].echo(request.prompts[number // request.n].text, self.texts[number].c)
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

    async def _event(self, content: dict[str, Any], *, more: bool = True) -> None:
        await self._write(json.dumps(content, allow_nan=False), more=more)

    async def _write(self, data: str, *, more: bool) -> None:
        """A server-sent event; the first brings the headers."""
        send = self._client[2]
        if not self._began:
            self._began = True
            headers = [
                (b"content-type", b"text/event-stream"),
                (b"cache-control", b"no-store"),
                (b"x-accel-buffering", b"no"),  # for nginx
            ]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": more})

    async def _end(self, error: ApiError) -> None:
        if self._began:
            await self._event(error.json(), more=False)
        else:
            await error_response(error)(*self._client)


async def _leave_with_the_client(receive: Receive, scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


async def _refuse(request: Request, error: Any) -> Response:
    if isinstance(error, HTTPException):
        error = ApiError(f"{request.method} {request.url.path}: {error.detail}", status=error.status_code)
    return error_response(error)


async def _fail(request: Request, error: Exception) -> Response:
    if not isinstance(error, ClientDisconnect):
        traceback.print_exception(error)
    return error_response(ApiError("an error of the server's own; its log says more", status=500))
