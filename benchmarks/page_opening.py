"""The page in a file, opened: 270 heads, 2,048 tokens; how soon it is painted, and what follows the pointer.

SmolLM2's 30 × 9 heads on 2,048 tokens of prose, in the file that `View.save` writes by default (25 MB), opened from the
disk in Chromium at 1440 × 900. First paint is when the browser painted something, as it says itself; then text and
numbers can be used. A move of the pointer is what the page's script, style and layout take, in the handler and in the
frame after it, without the wait for that frame: over the text, where everything follows; over a text with a pinned
query, where one weight is read; over the atlas, where the card of a head follows; over the matrix.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

from _report import Report
from playwright.sync_api import sync_playwright

import clearhead
from clearhead import zoo

TOKENS, OPENINGS, MOVES = 2_048, 7, 60
ROOT = Path(__file__).parent.parent
PAINTED = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
READY = """new MutationObserver((_, self) => {
    if (document.body?.dataset.ready) window.ready ??= performance.now();
}).observe(document, { subtree: true, childList: true, attributes: true })"""
MOVE = """async (targets) => {
    const frame = () => new Promise((done) => requestAnimationFrame(done)), times = [];
    for (const [selector, x, y] of targets) {
        const target = document.querySelector(selector), box = target.getBoundingClientRect();
        const at = { bubbles: true, clientX: box.left + (x ?? 2), clientY: box.top + (y ?? 2) };
        await frame();
        let begun;
        requestAnimationFrame(() => (begun = performance.now())); // before what the page asks for
        const start = performance.now();
        for (const kind of ["pointermove", "mouseover", "mousemove"]) target.dispatchEvent(new PointerEvent(kind, at));
        const handled = performance.now() - start;
        await frame(); // after it
        document.body.offsetHeight;
        times.push(handled + performance.now() - begun);
    }
    return times;
}"""


def main() -> None:
    with Report(__file__, "The page, opened") as report, tempfile.TemporaryDirectory() as folder:
        file = saved(Path(folder) / "page.html")
        with sync_playwright() as playwright:
            command = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
            browser = playwright.chromium.launch(executable_path=command, args=["--no-sandbox", "--disable-gpu"])
            found = [opened(browser, file) for _ in range(OPENINGS)]
            rows = list(moves(found[-1][0]))
            browser.close()
        painted, ready = (statistics.median(column) for column in zip(*(times for _, times in found), strict=True))
        size = file.stat().st_size / 1e6
        report.say(
            f"{size:.1f} MB: first paint after {painted / 1e3:.2f} s, text and numbers after {ready / 1e3:.2f} s."
        )
        report.table(["the pointer over", "ms", "most"], rows)


def saved(path: Path) -> Path:
    """The page of the first tokens of some prose."""
    model, tokenizer = zoo.load("smollm2")
    prose = "\n".join((ROOT / name).read_text() for name in ("LICENSE", "CONTRIBUTING.md", "CHANGELOG.md"))
    ends = tokenizer(prose, return_offsets_mapping=True, verbose=False)["offset_mapping"]
    return clearhead.look(model, tokenizer, prose[: ends[TOKENS - 1][1]]).save(path)


def opened(browser: Any, file: Path) -> tuple[Any, tuple[float, float]]:
    """A page, and the milliseconds until its first paint and until it can be used."""
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    page.add_init_script(READY)
    page.goto(file.as_uri() + "#q=1900")
    page.wait_for_selector("body[data-ready]", timeout=60_000)
    return page, (page.evaluate(PAINTED), page.evaluate("window.ready"))


def moves(page: Any) -> Any:
    """A row for each thing that the pointer moves over."""
    tokens = [[f"#t{i}", None, None] for i in range(1_800, 1_800 + 2 * MOVES, 2)]
    heads = [[f"[data-head='{i % 30}.{i % 9}']", None, None] for i in range(MOVES)]
    cells = [["#canvas", 100 + i, 200 + i] for i in range(MOVES)]
    yield row("a text with a pinned query", page.evaluate(MOVE, tokens))
    page.click("#t1900")  # again: the pointer leads
    yield row("a text, and everything follows", page.evaluate(MOVE, tokens))
    yield row("the atlas", page.evaluate(MOVE, heads))
    yield row("the matrix", page.evaluate(MOVE, cells))


def row(what: str, times: list[float]) -> list[str]:
    return [what, f"{statistics.median(times):.1f}", f"{max(times):.1f}"]


if __name__ == "__main__":
    main()
