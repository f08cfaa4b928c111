"""Limits for connections: who may connect, and how long a connection may wait without a request."""

import asyncio
import ipaddress
from collections.abc import Collection
from urllib.parse import urlsplit

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

GRACE = 2  # When the server stops, open connections have GRACE seconds to end.
CONNECTIONS = 512  # The largest number of open connections.
# A client must send the headers of a request, and read waiting bytes of an answer, within IDLE_SECONDS.
IDLE_SECONDS = 10.0


class ClientConnection(H11Protocol):
    """A connection that ends if its client takes longer than IDLE_SECONDS to send headers, or to read.

    uvicorn's own time limit starts only after a response and stops at the client's next byte. A client that sends one
    byte and then nothing would stay connected forever. If CONNECTIONS connections are open, a new connection replaces
    the oldest one whose client has not sent its whole request.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the time limit for the headers."""
        clients = [each for each in self.connections if isinstance(each, ClientConnection) and each.awaits_request]
        if len(self.connections) >= CONNECTIONS and clients:
            oldest = min(clients, key=lambda each: each.opened)
            self.connections.discard(oldest)
            oldest.transport.abort()
        self.opened = self.loop.time()
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)  # asyncio calls `pause_writing` as soon as a byte waits.
        self.timeout_keep_alive_task = self.loop.call_later(IDLE_SECONDS, transport.abort)

    @property
    def awaits_request(self) -> bool:
        """True until the client has sent a whole request."""
        return self.conn.their_state is h11.IDLE or self.conn.their_state is h11.SEND_BODY

    def data_received(self, data: bytes) -> None:
        """Read a part of a request. The time limit for the headers ends when the headers are complete."""
        self.conn.receive_data(data)
        self.handle_events()
        if self.cycle is not None and not self.cycle.response_complete:
            self._unset_keepalive_if_required()

    def timeout_keep_alive_handler(self) -> None:
        """End the connection, even if its client has not read everything."""
        self.transport.abort()

    def pause_writing(self) -> None:
        """Start the time limit within which the client must read the waiting bytes."""
        super().pause_writing()
        self._unread = self.loop.call_later(IDLE_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """Cancel the time limit, because the client has read the waiting bytes."""
        super().resume_writing()
        self._unread.cancel()


def build_server(app: ASGIApp) -> uvicorn.Server:
    """Make the server. `run(sockets=...)` starts it."""
    return uvicorn.Server(
        uvicorn.Config(
            app,
            lifespan="off",
            log_config=None,
            log_level="critical",
            timeout_graceful_shutdown=GRACE,
            timeout_keep_alive=IDLE_SECONDS,  # type: ignore[arg-type]  # only used as seconds
            # If CONNECTIONS requests are being answered, a new request gets status 503.
            limit_concurrency=CONNECTIONS + 1,
            http=ClientConnection,
            ws="none",
            loop="asyncio",
        )
    )


def is_allowed_host(header: str, allowed: Collection[str]) -> bool:
    """Return whether a request's Host header is an IP address, localhost or one of the `allowed` names.

    A web page of a different site can send requests to this server if the site's name resolves to the server's address
    (DNS rebinding). With DNS rebinding, the Host header of a request has the site's name.
    """
    try:
        name = (urlsplit(f"//{header}").hostname or "").removesuffix(".")
        return name in {"localhost", *map(str.lower, allowed)} or bool(ipaddress.ip_address(name))
    except ValueError:
        return False
