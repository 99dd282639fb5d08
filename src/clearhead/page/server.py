"""The page served live, to this computer alone: what a file has no room for is computed when it is asked for.

    server = Server()                      # a free port of 127.0.0.1, taken at once
    server.show(view.answers())            # http://127.0.0.1:51234/8ZTq…/0/
    server.run()                           # until Ctrl-C, or server.stop() in another thread

Who knows the address may read the text and its numbers, nobody else: it has a random token in it, names of other hosts
and pages of other origins are turned away, and no file is ever looked for by a name that arrives.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import socket
from collections.abc import Callable, Sequence
from typing import Any

import torch

from clearhead.errors import RecordingError, ShapeError
from clearhead.kernels.workers import alone
from clearhead.page.answers import Answers, UnknownPart
from clearhead.page.shell import live_shell, script, static

try:
    import uvicorn
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import Receive, Scope, Send
    from uvicorn.protocols.http.h11_impl import H11Protocol
except ImportError as error:
    raise ImportError(
        f'a live page needs {(error.name or "starlette").partition(".")[0]}: pip install "clearhead[page]"'
    ) from None

__all__ = ["Server"]

HOST = "127.0.0.1"
REQUEST = 8_192  # bytes that a question, and a head that comes in pieces, may have
CONNECTIONS = 64  # at a time; a browser opens six
SECONDS = 30  # that a request, its answer, and taking the answer in may take each

_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_FILES: dict[str, tuple[str, Callable[[], str]]] = {
    "": ("text/html", live_shell),
    "page.js": ("text/javascript", script),
    "style.css": ("text/css", lambda: static("style.css")),
}


class Server:
    """A page for each of some views, on a port of this computer.

    Args: port: 0 for a free one. A context manager, which gives the port back.
    Raises RecordingError where the port is taken or may not be used.
    """

    def __init__(self, *, port: int = 0) -> None:
        self._socket = _bound(port)
        self.port: int = self._socket.getsockname()[1]
        self._token, self._pages = secrets.token_urlsafe(16), list[Answers]()
        config = uvicorn.Config(
            _App(self._pages, self._token, self.port),
            http=_Impatient,
            ws="none",
            lifespan="off",
            log_level="error",
            access_log=False,  # addresses have the token in them
            server_header=False,
            proxy_headers=False,
            limit_concurrency=CONNECTIONS,
            timeout_graceful_shutdown=1,
            h11_max_incomplete_event_size=REQUEST,
        )
        self._server = uvicorn.Server(config)

    def show(self, answers: Answers, labels: Sequence[str | int] | None = None) -> str:
        """One more page, which asks these: its address. Labels: what all pages are called, see `Views`."""
        answers.stand_beside(self._pages, len(self._pages), labels)
        self._pages.append(answers)
        return f"http://{HOST}:{self.port}/{self._token}/{len(self._pages) - 1}/"

    @property
    def url(self) -> str:
        """The address of the first page."""
        return f"http://{HOST}:{self.port}/{self._token}/0/"

    def run(self) -> None:
        """Answer until Ctrl-C or `stop`; then the port is free again."""
        self._server.run(sockets=[self._socket])

    def stop(self) -> None:
        """End `run`, from any thread."""
        self._server.should_exit = True

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        """Give the port back, whether it was answered on or not."""
        self._socket.close()


def _bound(port: int) -> socket.socket:
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        if os.name == "posix":  # elsewhere this would let another program take the port over
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((HOST, port))
        bound.listen()
    except (OSError, OverflowError) as error:
        bound.close()
        why = getattr(error, "strerror", None) or error
        raise RecordingError(
            f"cannot use port {port} of {HOST}: {why}. Without a number, a free one is taken."
        ) from None
    return bound


class _App:
    """What is answered to whom."""

    def __init__(self, answers: Sequence[Answers], token: str, port: int) -> None:
        self._answers, self._token = answers, token.encode()
        self._hosts = {f"{name}:{port}" for name in (HOST, "localhost")}
        workers = max(1, min(4, torch.get_num_threads()))
        self._pool = alone(workers)
        self._turn = asyncio.Semaphore(workers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The application: one way in, so that nothing is answered past the checks."""
        response = await self._respond(Request(scope, receive))
        await response(scope, receive, send)

    async def _respond(self, request: Request) -> Response:
        path = request.scope["path"][1:]
        found = self._turned_away(request, path) or self._static(path)
        if isinstance(found, Response):
            return found
        try:
            return await asyncio.wait_for(self._part(request, *found), SECONDS)
        except asyncio.TimeoutError:
            return _said(503, f"This took longer than {SECONDS} seconds and was given up: ask for less at a time.")

    def _turned_away(self, request: Request, path: str) -> Response | None:
        headers, (token, _, _) = request.headers, path.partition("/")
        hosts = headers.getlist("host")
        foreign = any(origin != f"http://{host}" for origin in headers.getlist("origin") for host in hosts)
        if len(hosts) != 1 or hosts[0] not in self._hosts or foreign:
            return _said(403, "This address answers only the page that it shows.")
        if not secrets.compare_digest(token.encode(), self._token):
            return _said(404, "There is nothing here. The address that clearhead printed has a key in it.")
        if request.method not in ("GET", "HEAD"):
            return _said(405, "Only questions are answered here, with GET.")
        if len(request.scope["raw_path"]) + len(request.scope["query_string"]) > REQUEST:
            return _said(414, f"A question of more than {REQUEST:,} bytes.")
        if headers.get("content-length", "0") != "0" or "transfer-encoding" in headers:
            return _said(413, "A request with a body: only questions are answered here, and nothing is taken in.")
        return None

    def _static(self, path: str) -> Response | tuple[Answers, str]:
        """The page and its files by the names that they have; or whom to ask for which part."""
        place = re.fullmatch(r"[^/]*/(\d{1,4})/(?:(part)/)?([\w.]*)", path, re.ASCII)
        if place is None or int(place[1]) >= len(self._answers):
            return _said(404, "There is nothing under this address.")
        if place[2]:
            return self._answers[int(place[1])], place[3]
        if place[3] not in _FILES:
            return _said(404, "There is nothing under this address.")
        kind, text = _FILES[place[3]]
        return Response(text(), headers=_HEADERS, media_type=kind)

    async def _part(self, request: Request, answers: Answers, name: str) -> Response:
        async with self._turn:
            if await request.is_disconnected():  # the page moved on while this one waited
                return _said(499, "Nobody is waiting for this.")
            work = asyncio.get_running_loop().run_in_executor(
                self._pool, answers.part, name, dict(request.query_params)
            )
            try:
                return Response(await work, headers=_HEADERS, media_type="application/octet-stream")
            except UnknownPart as error:
                return _said(404, str(error))
            except ShapeError as error:
                return _said(400, str(error))
            except (OSError, RecordingError) as error:
                return _said(410, f"The recording can no longer be read: {error}")


def _said(status: int, sentence: str) -> Response:
    return Response(sentence + "\n", status, headers=_HEADERS, media_type="text/plain")


class _Impatient(H11Protocol):
    """Ends a connection over which no whole request comes in time, or whose answer is not taken in time."""

    _patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._allow(SECONDS)

    def handle_events(self) -> None:
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:  # a whole request is here
            self._allow(2 * SECONDS)

    def on_response_complete(self) -> None:
        self._allow(SECONDS)
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._allow(None)
        super().connection_lost(exc)

    def _allow(self, seconds: float | None) -> None:
        if self._patience is not None:
            self._patience.cancel()
        self._patience = None if seconds is None else self.loop.call_later(seconds, self.transport.abort)
