"""The live page: how long a tile of the matrix takes at every zoom, and how soon a page of 8,192 tokens stands.

One head of random q and k, width 64, causal, 8,192 to 131,072 tokens. A tile is 256 × 256 pixels, fewer where the map
ends or where the page asks for fewer: as it does from a layer that was not read yet, of which nothing is kept. Tiles
lie anywhere below the diagonal; none is asked for twice. Time is that of a request over HTTP from this computer, the
server's and the client's Python in it, on one core each. The page is opened in Chromium: until the text can be used,
and until the whole matrix is painted, of a layer that was read and of one that was just recorded.
"""

from __future__ import annotations

import http.client
import os
import random
import shutil
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

os.environ.setdefault("OMP_NUM_THREADS", "1")  # steadier beside other work
os.environ.setdefault("NUMBA_NUM_THREADS", "1")

import torch
from _report import Report

import clearhead
from clearhead import SoftmaxMap, View, masks
from clearhead.kernels.tiles import stream
from clearhead.maps.reductions import Blocks
from clearhead.page.answers import Answers
from clearhead.page.peaks import FINEST, encoded
from clearhead.page.server import Server

LENGTHS, WIDTH, PIXELS, DEAR, ROUNDS = (8_192, 32_768, 131_072), 64, 256, 4_096, 15


def main() -> None:
    with Report(__file__, "The live page") as report:
        for n in LENGTHS:
            view = recorded(n)
            with served(view.answers()) as port_and_path:
                told = {"recorded": tiles(*port_and_path, n, read=False)}
            start = time.perf_counter()
            answers = read(view)
            reading = time.perf_counter() - start
            with served(answers) as port_and_path:
                told["read"] = tiles(*port_and_path, n, read=True)
            medians = [statistics.median(found) for found in told["read"].values()]
            report.say(
                f"{n:,} tokens: over all zooms {statistics.median(medians):.1f} ms. Reading takes {reading:.1f} s."
            )
            report.table(["weights a pixel", "read, ms", "most", "just recorded, ms", "most"], rows(told))
            if n == LENGTHS[0]:
                for state, one in (("read", view), ("just recorded", recorded(n))):
                    report.say(f"The page of a layer that was {state}: {opening(one)}.")


def rows(told: dict[str, dict[int, list[float]]]) -> Iterator[list[str]]:
    for side in told["read"]:
        found = [told[state].get(side) for state in ("read", "recorded")]
        cells = [[f"{statistics.median(one):.1f}", f"{max(one):.1f}"] if one else ["-", "-"] for one in found]
        yield [f"{side} × {side}", *cells[0], *cells[1]]


def recorded(n: int) -> View:
    """A view of one layer with one head, nothing computed yet."""

    class Layer(torch.nn.Module):
        def attend(self, x: torch.Tensor) -> tuple[torch.Tensor, SoftmaxMap]:
            draw = torch.Generator().manual_seed(0)
            q, k, v = (scale * torch.randn(1, 1, n, WIDTH, generator=draw) for scale in (2.0, 1.0, 1.0))
            return x, SoftmaxMap(q, k, v=v, mask=masks.causal())

    words = random.Random(0).choices([f"word{i}" for i in range(5_000)], k=n)
    return clearhead.look(Layer(), torch.zeros(n, 1), tokens=words, name="random")


def read(view: View) -> Answers:
    """All that reading does; of a very long text the peaks alone, which are all that tiles are made from."""
    n = len(view.tokens)
    if n <= LENGTHS[1]:
        view.heads()
        return view.answers()
    answers, attn = view.answers(), view.maps[0][0]
    peaks = Blocks((1,), n, n, FINEST, attn.like)
    stream(attn, peaks)
    answers._layers[0] = replace(answers._layers[0], peaks=encoded(peaks.result), side=FINEST)
    return answers


@contextmanager
def served(answers: Answers) -> Iterator[tuple[int, str]]:
    with Server() as server:
        url = server.show(answers)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        yield server.port, "/" + url.split("/", 3)[3]
        server.stop()
        thread.join()


def tiles(port: int, path: str, n: int, *, read: bool) -> dict[int, list[float]]:
    """Milliseconds by weights a pixel: every power of two up to the whole map in one tile."""
    connection, draw, found = http.client.HTTPConnection("127.0.0.1", port), random.Random(1), dict[int, list[float]]()
    side = 1
    while side * PIXELS < 2 * n:
        width = PIXELS if read or side <= FINEST else max(8, DEAR // side)
        if not read and side > 512:
            break
        span = min(n, width * side)
        corners = {(draw.randrange(-(-n // span)), draw.randrange(-(-n // span))) for _ in range(4 * ROUNDS)}
        asked = [(i * span, j * span) for i, j in corners if j <= i][:ROUNDS]
        found[side] = []
        for i, j in asked:
            start = time.perf_counter()
            query = f"rows={i}-{min(n, i + span)}&keys={j}-{min(n, j + span)}&side={side}&of=max"
            connection.request("GET", f"{path}part/tile.0.0?{query}")
            answer = connection.getresponse()
            answer.read()
            found[side].append(1e3 * (time.perf_counter() - start))
            assert answer.status == 200, answer.status
        side *= 2
    return found


def opening(view: View) -> str:
    from playwright.sync_api import sync_playwright

    with served(view.answers()) as (port, path), sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        times = []
        for _ in range(5):
            page = browser.new_page(viewport={"width": 1440, "height": 900})
            start = time.perf_counter()
            page.goto(f"http://127.0.0.1:{port}{path}")
            page.wait_for_selector("body[data-ready]")
            ready = time.perf_counter() - start
            while "reading" in (told := page.inner_text("#pixel")) or not told:
                pass
            times.append((ready, time.perf_counter() - start))
            page.close()
        browser.close()
    ready, painted = (statistics.median(column) for column in zip(*times, strict=True))
    return f"text and numbers after {ready:.2f} s, the matrix after {painted:.2f} s"


if __name__ == "__main__":
    main()
