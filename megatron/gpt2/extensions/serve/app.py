"""The endpoints of the server: OpenAI's `/v1/completions` and `/v1/models`, Megatron's `/api` and `/generate`,
`/health`, and the web page at `/`."""

import asyncio
import json
import time
import traceback
import uuid
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import anyio
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from megatron.gpt2.extensions.serve.batching import Batcher
from megatron.gpt2.extensions.serve.connections import is_allowed_host
from megatron.gpt2.extensions.serve.request import (
    ApiError,
    CompletionRequest,
    ServedModel,
    read_megatron_request,
    read_request,
)
from megatron.gpt2.generate.generation import GeneratedToken

MEGATRON = ("/api", "/generate")  # the addresses of Megatron's servers
PAGE = Path(__file__).with_name("page.html")
# The page contains all files that it needs. The page must not load anything from other hosts.
PAGE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:"
)
BODY_SECONDS = 30.0  # seconds within which the body of a request must arrive


def json_response(content: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Make a JSON response in ASCII. An error may quote text of a client that is not valid Unicode."""
    return Response(json.dumps(content, allow_nan=False), status, headers, "application/json")


def error_response(error: ApiError) -> Response:
    """Make the response to a failed request, in OpenAI's form."""
    # OpenAI's client does not repeat a request whose answer has x-should-retry: false. A second try would fail, too.
    headers = {"Retry-After": "1"} if error.status == 503 else {"x-should-retry": "false"}
    if error.status == 408:
        headers["Connection"] = "close"  # The server does not read the rest of the body.
    return json_response(error.json(), error.status, headers)


class HostCheck:
    """Refuses requests whose Host header `is_allowed_host` does not accept."""

    def __init__(self, app: ASGIApp, allowed: Collection[str]) -> None:
        self.app, self.allowed = app, allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host, app = Headers(scope=scope).get("host", ""), self.app
        if not is_allowed_host(host, self.allowed):
            wrong = (
                f"the Host header is {host!r}, which this server does not answer: start it with --allowed-hosts NAME"
            )
            app = error_response(ApiError(wrong, status=403))
        await app(scope, receive, send)


@dataclass
class Service:
    """The endpoints and the state that they share. Only the thread of the event loop uses this object.

    max_texts: limit of running and waiting texts.
    max_seconds: time limit for an answer in seconds.
    log: called with a line for each request.
    allowed_hosts: the host names that `is_allowed_host` accepts.
    """

    served: ServedModel
    batcher: Batcher
    max_texts: int
    max_seconds: float
    log: Callable[[str], None]
    allowed_hosts: Collection[str] = ()
    started: int = field(default_factory=lambda: int(time.time()))
    admitted: int = 0  # the number of running and waiting texts

    def app(self) -> Starlette:
        """Make the application with all endpoints."""
        return Starlette(
            routes=[
                Route("/", self.page),
                Route("/health", self.health),
                Route("/v1/models", self.models),
                Route("/v1/models/{name:path}", self.model_of_name),
                Route("/v1/completions", partial(self.complete, read=read_request), methods=["POST"]),
                *(
                    Route(path, partial(self.complete, read=read_megatron_request), methods=["PUT"])
                    for path in MEGATRON
                ),
            ],
            middleware=[Middleware(HostCheck, allowed=self.allowed_hosts)],
            exception_handlers={ApiError: _on_api_error, HTTPException: _on_api_error, Exception: _on_exception},
        )

    async def page(self, request: Request) -> Response:
        """Answer GET / with the web page."""
        return Response(PAGE.read_bytes(), media_type="text/html", headers={"Content-Security-Policy": PAGE_POLICY})

    async def health(self, request: Request) -> Response:
        """Answer GET /health with the status and the number of running and waiting texts."""
        return json_response({"status": "ok", "texts": self.admitted})

    async def models(self, request: Request) -> Response:
        """Answer GET /v1/models with a list of the served model, in OpenAI's form."""
        return json_response({"object": "list", "data": [self._model()]})

    async def model_of_name(self, request: Request) -> Response:
        """Answer GET /v1/models/NAME with the served model. Raises ApiError if NAME is a different model."""
        self.served.check_model(request.path_params["name"])
        return json_response(self._model())

    def _model(self) -> dict[str, Any]:
        return {
            "id": self.served.model,
            "object": "model",
            "created": self.started,
            "owned_by": "local",
            "max_model_len": self.served.context,
            "max_tokens": self.served.max_tokens,
        }

    async def complete(self, request: Request, read: Callable[[bytes, ServedModel], CompletionRequest]) -> Response:
        """Answer POST /v1/completions, PUT /api and PUT /generate with texts, at once or streamed. Raises ApiError for
        an invalid request.

        read: parses the body.
        """
        # Browsers let a page of a different site send a form or plain text, but not JSON.
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise ApiError("send the header Content-Type: application/json", status=415)
        body = await self._body(request)
        wanted = await run_in_threadpool(read, body, self.served)
        if self.admitted + len(wanted.texts) > self.max_texts:
            raise ApiError(
                f"{self.admitted} texts are running or waiting, and the limit is {self.max_texts}: try again later",
                status=503,
            )
        return CompletionResponse(self, wanted, f"{request.client.host if request.client else '?'} {request.url.path}")

    async def _body(self, request: Request) -> bytes:
        body = bytearray()
        with anyio.move_on_after(BODY_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > self.served.max_body_bytes:
                    raise ApiError(f"the body is larger than {self.served.max_body_bytes} bytes", status=413)
            return bytes(body)
        raise ApiError(f"the body took longer than {BODY_SECONDS:g} seconds", status=408)


class CompletionResponse(Response):
    """The answer to a request, at once or streamed. If the client disconnects, the texts are cancelled."""

    def __init__(self, service: Service, request: CompletionRequest, origin: str) -> None:
        self.service, self.request, self.origin = service, request, origin
        self.started, self._began = time.monotonic(), False
        self.texts = request.texts
        self.head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": service.served.model,
        }
        service.admitted += len(self.texts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._client = scope, receive, send
        outcome, limit = "the client went away", self.service.max_seconds
        try:
            with anyio.move_on_after(limit) as deadline:
                async with anyio.create_task_group() as group:
                    group.start_soon(_cancel_on_disconnect, receive, group.cancel_scope)
                    outcome = await self._answer()
                    group.cancel_scope.cancel()
            if deadline.cancelled_caught:
                outcome = f"ended after {limit:g} seconds"
                late = f"the answer took longer than {limit:g} seconds: ask for fewer tokens"
                await self._end(ApiError(late, status=504))
        finally:
            self.service.admitted -= len(self.texts)
            for text in self.texts:
                text.c.cancel()
            seconds, tokens = time.monotonic() - self.started, self.request.usage()
            self.service.log(
                f"{self.origin}: {tokens['prompt_tokens']} + {tokens['completion_tokens']} tokens in "
                f"{seconds:.2f} s, {outcome}"
            )

    async def _answer(self) -> str:
        """Send the answer. Return "done" or the error, for the log."""
        request = self.request
        uncounted = {"usage": None} if request.include_usage else {}
        try:
            async for number, event in self._events():
                for chunk in self.texts[number].add(event):
                    if request.stream and (event.finish or chunk["text"]):
                        await self._write({**self.head, "choices": [chunk], **uncounted})
        except ApiError as error:
            await self._end(error)
            return str(error)
        if not request.stream:
            await json_response(request.answer(self.service.served.tokenizer, self.head))(*self._client)
            return "done"
        if request.include_usage:
            await self._write({**self.head, "choices": [], "usage": request.usage()})
        await self._write("[DONE]", more=False)
        return "done"

    async def _events(self) -> AsyncIterator[tuple[int, GeneratedToken]]:
        """Yield pairs of a text's number and its next token. Raises ApiError if the server stops."""
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[tuple[int, GeneratedToken | None]] = asyncio.Queue()

        def deliver(*event: Any) -> None:
            loop.call_soon_threadsafe(events.put_nowait, event)

        self.service.batcher.submit([text.c for text in self.texts], deliver)
        running = len(self.texts)
        while running:
            number, event = await events.get()
            if event is None:
                raise ApiError("the server is stopping", status=503)
            running -= bool(event.finish)
            yield number, event

    async def _write(self, content: Any, *, more: bool = True) -> None:
        """Send `content` as a server-sent event, after the HTTP headers. A string is sent unchanged, any other value as
        JSON."""
        send = self._client[2]
        if not self._began:
            self._began = True
            headers = [
                (b"content-type", b"text/event-stream"),
                (b"cache-control", b"no-store"),
                (b"x-accel-buffering", b"no"),  # nginx reads this header.
            ]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        text = content if isinstance(content, str) else json.dumps(content, allow_nan=False)
        await send({"type": "http.response.body", "body": f"data: {text}\n\n".encode(), "more_body": more})

    async def _end(self, error: ApiError) -> None:
        if self._began:
            await self._write(error.json(), more=False)
        else:
            await error_response(error)(*self._client)


async def _cancel_on_disconnect(receive: Receive, scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


async def _on_api_error(request: Request, error: Any) -> Response:
    if isinstance(error, HTTPException):
        error = ApiError(f"{request.method} {request.url.path}: {error.detail}", status=error.status_code)
    return error_response(error)


async def _on_exception(request: Request, error: Exception) -> Response:
    if not isinstance(error, ClientDisconnect):
        traceback.print_exception(error)
    return error_response(ApiError("internal server error: see the server's log", status=500))
