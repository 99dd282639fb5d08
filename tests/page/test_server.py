"""The live page's server: it answers its own page, and gives nothing away to anybody else."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clearhead import RecordingError, View, masks
from clearhead.page import answers as answers_module
from clearhead.page.shell import script, static

from .test_answers import N, read

pytest.importorskip("uvicorn", reason="needs the packages starlette and uvicorn")
pytest.importorskip("starlette")

from clearhead.page import server as server_module
from clearhead.page.server import Server

GUARDS = ("content-security-policy", "x-content-type-options", "referrer-policy", "cross-origin-resource-policy")


class Running:
    """A server in a thread of its own."""

    def __init__(self, *views: View) -> None:
        self.server = Server()
        for view in views:
            self.server.show(view.answers())
        self.port, self.url = self.server.port, self.server.url
        self.token = self.url.split("/")[3]
        self._thread = threading.Thread(target=self.server.run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self.server.stop()
        self._thread.join(20)
        assert not self._thread.is_alive()

    def ask(
        self, path: str, method: str = "GET", body: str | None = None, **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body. `path` as it is sent; {token} stands for the key."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            connection.request(method, path.replace("{token}", self.token), body=body, headers=headers)
            response = connection.getresponse()
            return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()
        finally:
            connection.close()

    def said(self, path: str, status: int, **more: Any) -> str:
        """The sentence of a request that is turned away, with every guard on it."""
        got, headers, body = self.ask(path, **more)
        assert got == status, body
        assert all(headers.get(name) for name in GUARDS)
        assert headers["content-type"] == "text/plain; charset=utf-8"
        assert self.token not in body.decode()
        return body.decode()


@pytest.fixture(scope="module")
def view() -> View:
    return read(mask=masks.causal())


@pytest.fixture(scope="module")
def live(view: View) -> Iterator[Running]:
    running = Running(view, view)
    yield running
    running.stop()


def test_the_page_and_its_files_are_served_with_a_strict_policy(live: Running) -> None:
    status, headers, body = live.ask("/{token}/0/")
    assert status == 200
    assert headers["content-type"].startswith("text/html")
    assert '<meta name="source" content="live">' in body.decode()
    policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
    assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == policy["frame-ancestors"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["cache-control"] == "no-store"
    assert "server" not in headers
    assert 'src="page.js"' in body.decode()
    for name, kind, text in [("page.js", "javascript", script()), ("style.css", "css", static("style.css"))]:
        status, headers, body = live.ask(f"/{{token}}/0/{name}")
        assert (status, body.decode()) == (200, text)
        assert headers["content-type"].split(";")[0] == f"text/{kind}"


def test_a_part_is_what_python_answers(live: Running, view: View) -> None:
    status, headers, body = live.ask("/{token}/0/part/tile.0.1?rows=0-90&keys=0-90&side=1&of=max")
    assert (status, headers["content-type"]) == (200, "application/octet-stream")
    assert np.allclose(np.frombuffer(body, "<f4").reshape(N, N), view.maps[0].to_dense()[0, 1], atol=1e-6)
    facts = json.loads(live.ask("/{token}/1/part/facts")[2])
    assert (facts["name"], facts["page"]) == ("a layer", 1)
    assert facts["pages"] == ["a layer: the keeper lit the lamp and wrote in the…"] * 2


def test_the_address_is_this_computer_alone(live: Running) -> None:
    assert re.fullmatch(rf"http://127\.0\.0\.1:{live.port}/[\w-]{{22}}/0/", live.url)
    assert live.server._socket.getsockname()[0] == "127.0.0.1"
    with Server() as other:
        assert other.url.split("/")[3] != live.token


# --- who is turned away -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", ["/", "/0/", "/0/part/facts", "/{token}x/0/", "/x{token}/0/", "/favicon.ico", "/%00", "/é"]
)
def test_without_the_key_there_is_nothing(path: str, live: Running) -> None:
    path = path.replace("é", "%C3%A9")
    assert live.said(path, 404) == "There is nothing here. The address that clearhead printed has a key in it.\n"


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "", "127.0.0.1:{port}.evil"]
)
def test_a_foreign_host_is_turned_away_with_the_key_too(host: str, live: Running) -> None:
    host = host.format(port=live.port)
    assert live.said("/{token}/0/part/facts", 403, Host=host) == "This address answers only the page that it shows.\n"


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "http://127.0.0.1", "https://127.0.0.1:{port}", "127.0.0.1:{port}"]
)
def test_a_foreign_origin_is_turned_away_with_the_key_too(origin: str, live: Running) -> None:
    origin = origin.format(port=live.port)
    assert "answers only the page" in live.said("/{token}/0/part/facts", 403, Origin=origin)


def test_the_page_s_own_origin_and_the_other_name_of_this_computer(live: Running) -> None:
    for name in ("127.0.0.1", "localhost"):
        host = f"{name}:{live.port}"
        status, headers, _ = live.ask("/{token}/0/part/facts", Host=host, Origin=f"http://{host}")
        assert status == 200
        assert "access-control-allow-origin" not in headers
    live.said("/{token}/0/part/facts", 403, Host=f"127.0.0.1:{live.port}", Origin=f"http://localhost:{live.port}")


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/",
        "/0",
        "/2/",
        "/00000/",
        "/0/payload.py",
        "/0/main.js",
        "/0/../0/page.js",
        "/0/../../answers.py",
        "/0/%2e%2e/answers.py",
        "/0/..%2fanswers.py",
        "/0/%2e%2e%2f%2e%2e%2fetc%2fpasswd",
        "/0//etc/passwd",
        "/0/static/",
        "/0/page.js/",
        "/0/page.js%00",
        "/0/PAGE.JS",
        "/0/part/../page.js",
        "/0/part/..%2f..%2fserver",
        "/0/part/",
        "/0/part",
    ],
)
def test_no_file_is_found_by_climbing_and_no_folder_is_listed(path: str, live: Running) -> None:
    assert "there is no" in live.said("/{token}" + path, 404).lower()


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE", "PATCH"])
def test_nothing_but_questions(method: str, live: Running) -> None:
    said = live.said("/{token}/0/part/facts", 405, method=method, body="x" * 10)
    assert said == "Only questions are answered here, with GET.\n"
    assert live.said("/", 404, method=method) == live.said("/", 404)
    assert live.said("/{token}/0/", 403, method=method, Host="elsewhere.example") == live.said("/", 403, Host="a.b")


@pytest.mark.parametrize("path", ["http://127.0.0.1/{token}/0/", "http://elsewhere.example/{token}/0/", "*", "/%0a/0/"])
def test_what_is_no_path_is_turned_away_as_the_rest(path: str, live: Running) -> None:
    assert "There is nothing here" in live.said(path, 404, Host=f"127.0.0.1:{live.port}")


def test_a_question_with_a_body(live: Running) -> None:
    assert "nothing is taken in" in live.said("/{token}/0/part/facts", 413, body="x" * 100_000)


def test_a_question_that_is_too_long(live: Running) -> None:
    assert "more than 8,192 bytes" in live.said("/{token}/0/part/facts?" + "x" * 20_000, 414)
    with socket.create_connection(("127.0.0.1", live.port), timeout=10) as endless:
        sent, answer = 0, b""
        while not answer and sent < 50_000_000:  # a head that does not end is cut off long before it fills the memory
            try:
                endless.sendall(b"x" * 100_000)
                sent += 100_000
                endless.setblocking(False)
                answer = endless.recv(100)
            except BlockingIOError:
                endless.setblocking(True)
            except OSError:
                break
    assert sent < 5_000_000


def test_a_question_for_what_is_not_there(live: Running) -> None:
    assert live.said("/{token}/0/part/w.7.0", 404) == "there is no head 7.0\n"
    assert "whole number below 90" in live.said("/{token}/0/part/row.0.0?query=90", 400)


def test_a_million_tiles(live: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers_module, "PIXELS", 8000)
    assert "at most 8,000 at a time" in live.said("/{token}/0/part/tile.0.0?rows=0-90&keys=0-90&side=1", 400)
    assert "within 0-90" in live.said("/{token}/0/part/tile.0.0?rows=0-1000000&keys=0-1000000&side=1", 400)


def test_many_at_once_are_answered_or_told_to_wait(live: Running) -> None:
    path = "/{token}/0/part/tile.0.0?rows=0-90&keys=0-%d&side=1"
    with ThreadPoolExecutor(100) as pool:
        found = list(pool.map(lambda n: live.ask(path % (1 + n % N))[0], range(400)))
    assert set(found) <= {200, 503}
    assert found.count(200) >= 10
    assert live.ask("/{token}/0/part/facts")[0] == 200


# --- what goes wrong ----------------------------------------------------------------------------------------------


def test_a_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(RecordingError, match=rf"cannot use port {port} of 127\.0\.0\.1: Address already in use"):
            Server(port=port)
    with pytest.raises(RecordingError, match="cannot use port 99999"):
        Server(port=99999)


def test_a_port_is_free_again_after_the_server(view: View) -> None:
    first = Running(view)
    assert first.ask("/{token}/0/")[0] == 200
    first.stop()
    with Server(port=first.port) as again:
        assert again.port == first.port


def test_a_browser_that_closes_in_the_middle(live: Running, capfd: pytest.CaptureFixture[str]) -> None:
    question = f"GET /{live.token}/0/part/q.0.0 HTTP/1.1\r\nHost: 127.0.0.1:{live.port}\r\n\r\n".encode()
    for sent in (b"", question[:20], question, question * 3):
        connection = socket.create_connection(("127.0.0.1", live.port))
        connection.sendall(sent)
        connection.close()
    reset = socket.create_connection(("127.0.0.1", live.port))
    reset.sendall(question)
    reset.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    reset.close()
    assert live.ask("/{token}/0/part/facts")[0] == 200
    assert capfd.readouterr() == ("", "")


def test_who_has_left_is_not_computed_for(view: View, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module.torch, "get_num_threads", lambda: 1)
    running, asked, go_on = Running(view), [], threading.Event()

    def slowly(layer: object, h: int, query: dict[str, str]) -> bytes:
        asked.append(query["query"])
        go_on.wait(10)
        return b"x"

    monkeypatch.setitem(answers_module._OF_HEAD, "row", slowly)
    try:
        line = f"GET /{running.token}/0/part/row.0.0?query=%d HTTP/1.1\r\nHost: 127.0.0.1:{running.port}\r\n\r\n"
        sockets = [socket.create_connection(("127.0.0.1", running.port)) for _ in range(4)]
        for n, one in enumerate(sockets):
            one.sendall((line % n).encode())
            while n == 0 and not asked:
                time.sleep(0.01)
        time.sleep(0.1)
        for one in sockets[1:3]:
            one.close()
        time.sleep(0.1)
        go_on.set()
        assert b"200 OK" in sockets[3].recv(100)
        assert asked == ["0", "3"]
    finally:
        for one in sockets:
            one.close()
        running.stop()


def test_an_answer_that_takes_too_long(view: View, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "SECONDS", 1.0)
    running, go_on = Running(view), threading.Event()
    monkeypatch.setitem(answers_module._OF_HEAD, "row", lambda *args: go_on.wait(10) and b"x")
    try:
        assert "took longer than 1.0 seconds" in running.said("/{token}/0/part/row.0.0?query=1", 503)
        begun = socket.create_connection(("127.0.0.1", running.port))
        begun.settimeout(10)
        begun.sendall(b"GET / HT")  # and no more: the connection is closed
        assert begun.recv(100) == b""
        begun.close()
    finally:
        go_on.set()
        running.stop()


def test_a_second_request_that_does_not_end(view: View, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "SECONDS", 1.0)
    running = Running(view)
    line = f"GET /{running.token}/0/part/row.0.0?query=1 HTTP/1.1\r\nHost: 127.0.0.1:{running.port}\r\n\r\n".encode()
    try:
        with socket.create_connection(("127.0.0.1", running.port), timeout=10) as begun:
            begun.sendall(line)
            assert b"200 OK" in begun.recv(10_000)
            begun.sendall(line[:20])
            while begun.recv(10_000):
                pass
    finally:
        running.stop()


def test_an_answer_that_nobody_takes(view: View, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is let go of, with its connection."""
    monkeypatch.setattr(server_module, "SECONDS", 0.6)
    monkeypatch.setitem(answers_module._OF_HEAD, "row", lambda *args: bytes(30_000_000))
    running = Running(view)
    try:
        with socket.create_connection(("127.0.0.1", running.port)) as idle:
            path = f"/{running.token}/0/part/row.0.0?query=1"
            idle.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{running.port}\r\n\r\n".encode())
            state, end = running.server._server.server_state, time.monotonic() + 10
            while not state.connections and time.monotonic() < end:
                time.sleep(0.01)
            assert state.connections
            while state.connections and time.monotonic() < end:
                time.sleep(0.05)
            assert not state.connections
    finally:
        running.stop()


def test_a_recording_that_vanished_under_the_page(view: View, tmp_path: Path) -> None:
    """What is mapped stays readable on a system that lets go of names only; else the page is told."""
    expected = view.answers().part("row.0.0", {"query": "50"})
    running = Running(View.open(view.save_recording(tmp_path / "recording")))
    shutil.rmtree(tmp_path / "recording")
    try:
        assert running.ask("/{token}/0/part/row.0.0?query=50")[2] == expected
    finally:
        running.stop()


def test_a_recording_that_can_no_longer_be_read(view: View, monkeypatch: pytest.MonkeyPatch, live: Running) -> None:
    def gone(*args: object) -> bytes:
        raise RecordingError("its q was overwritten")

    monkeypatch.setitem(answers_module._OF_HEAD, "row", gone)
    assert "can no longer be read: its q was overwritten" in live.said("/{token}/0/part/row.0.0?query=1", 410)
