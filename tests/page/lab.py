"""A JupyterLab of our own, with nobody's settings: for the tests, and for the picture of a notebook."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import clearhead

READY = "document.body.dataset.ready === '1'"
QUIET = {"@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": False}}


def environment(folder: Path) -> dict[str, str]:
    """What a kernel and a server are started with: this clearhead, one thread, files in the folder alone."""
    places = {name: str(folder / name) for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR")}
    source = str(Path(clearhead.__file__).parents[1])
    return {**os.environ, **places, "IPYTHONDIR": str(folder / "ipython"), "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}


def write(path: Path, cells: Sequence[str]) -> Path:
    """A notebook of code cells."""
    import nbformat

    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
    made = [nbformat.v4.new_code_cell(cell) for cell in cells]
    notebook = nbformat.v4.new_notebook(cells=made, metadata=kernel)
    nbformat.write(notebook, path)
    return path


@contextmanager
def running(folder: Path) -> Iterator[str]:
    """Serve the notebooks of a folder: gives an address to which the name of one can be added."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    home, token = folder / ".home", secrets.token_urlsafe(16)
    (home / "JUPYTER_CONFIG_DIR" / "labconfig").mkdir(parents=True)
    (home / "JUPYTER_CONFIG_DIR" / "labconfig" / "default_setting_overrides.json").write_text(json.dumps(QUIET))
    options = {"IdentityProvider.token": token, "ServerApp.root_dir": folder, "LabApp.expose_app_in_browser": True}
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--port={port}"]
    log = home / "log"
    with log.open("w") as said:
        server = subprocess.Popen(
            [*command, *(f"--{name}={value}" for name, value in options.items())],
            env=environment(home),
            stdout=said,
            stderr=said,
        )
    try:
        _wait(f"http://127.0.0.1:{port}/api?token={token}", server, log)
        yield f"http://127.0.0.1:{port}/lab/tree/{{}}?token={token}&reset"
    finally:
        server.terminate()
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _wait(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + 60
    while server.poll() is None and time.monotonic() < end:
        try:
            urlopen(url, timeout=5).close()
            return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError(f"JupyterLab did not start: {log.read_text()[-2000:]}")


class Notebook:
    """One notebook, opened in JupyterLab."""

    def __init__(self, page: Any, address: str, name: str) -> None:
        self.page = page
        self._address = address.format(name)
        self.open()

    def open(self) -> None:
        self.page.goto(self._address)
        self.page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=60_000)
        self.page.wait_for_function("window.jupyterapp?.shell.currentWidget?.sessionContext?.isReady", timeout=60_000)
        self.context("session?.kernel?.info")  # a server that is stopped while a kernel begins does not stop

    def command(self, name: str, **arguments: Any) -> None:
        self.page.evaluate("([name, given]) => window.jupyterapp.commands.execute(name, given)", [name, arguments])

    def context(self, call: str) -> None:
        """Do something with the kernel."""
        self.page.evaluate(f"async () => {{ await jupyterapp.shell.currentWidget.sessionContext.{call}; }}")

    def frames(self, count: int) -> list[Any]:
        """The pages in the outputs, once there are so many and each shows its numbers."""
        until(lambda: self.page.locator("iframe").count() >= count, 60)
        frames = [handle.content_frame() for handle in self.page.query_selector_all("iframe")]
        for frame in frames:
            frame.frame_element().scroll_into_view_if_needed()  # what is out of sight is not drawn
            until(lambda frame=frame: frame.evaluate(READY), 30)
        return frames


def until(wanted: Any, seconds: float = 20) -> None:
    """Wait: the page's policy lets nobody evaluate text in it, so that it is asked again and again."""
    end = time.monotonic() + seconds
    while not wanted():
        if time.monotonic() > end:
            raise TimeoutError(f"not within {seconds} seconds")
        time.sleep(0.05)


def is_live(frame: Any) -> bool:
    return "live" in frame.inner_text("#facts").split()
