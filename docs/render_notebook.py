"""Take the picture of a view in JupyterLab, docs/images/notebook.png: half a minute, with the extra `lab`."""

from __future__ import annotations

import io
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "page"))

from lab import Notebook, is_live, running, until, write
from PIL import Image
from playwright.sync_api import Page, sync_playwright

TARGET = Path(__file__).parent / "images" / "notebook.png"
COLOURS = 128
CELLS = [
    "import clearhead\n\nmodel, tokenizer = clearhead.zoo.load('smollm2')",
    "text = 'Mira kept the light. When the storm came, the keeper ran down the stairs and closed the door. '\n"
    "text += 'In the morning the storm was gone. Mira kept the'\n"
    "view = clearhead.look(model, tokenizer, text)\nview",
]


def main() -> int:
    """Run the notebook, wait until its page is live, take the picture."""
    folder = Path(tempfile.mkdtemp())
    write(folder / "heads.ipynb", CELLS)
    with running(folder) as address, sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = chromium.new_page(viewport={"width": 1280, "height": 960}, color_scheme="light")
        picture = taken(page, Notebook(page, address, "heads.ipynb"))
        chromium.close()
    shutil.rmtree(folder)
    small = Image.open(io.BytesIO(picture)).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    small.save(TARGET, optimize=True)
    print(f"{TARGET.name}: {TARGET.stat().st_size:,} bytes")
    return 0


def taken(page: Page, notebook: Notebook) -> bytes:
    """A picture of the notebook, without the file browser, at its page."""
    notebook.command("application:toggle-left-area")
    notebook.command("notebook:run-all-cells")
    (frame,) = notebook.frames(1)
    until(lambda: is_live(frame), 60)
    page.evaluate("document.querySelector('.jp-Notebook .jp-WindowedPanel-outer, .jp-Notebook').scrollTop = 0")
    page.mouse.move(0, 0)
    page.wait_for_timeout(1500)  # toolbars and what the page paints last
    return page.screenshot()


if __name__ == "__main__":
    sys.exit(main())
