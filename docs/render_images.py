"""Make the pictures of the page in docs/images: about six minutes on two cores, two of them for 8,192 tokens.

Two of the models are made here, so that everything is on this machine: a translator of dates, trained for a minute, and
an untrained model that reads an image. Names on the command line choose some of the pictures.
"""

from __future__ import annotations

import io
import os
import random
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from PIL import Image
from playwright.sync_api import Browser, sync_playwright
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch.nn import functional as F
from transformers import MarianConfig, MarianMTModel, PreTrainedTokenizerFast, ViTConfig, ViTImageProcessorPil, ViTModel
from transformers.utils import logging

import clearhead
from clearhead import View, Views, nn, zoo
from clearhead.arguments import DEFAULT_TEXT
from clearhead.page.server import Server

ROOT = Path(__file__).parents[1]
IMAGES = Path(__file__).parent / "images"
MOST = 300_000  # bytes of a picture
OTHER_TEXT = (
    "Mara Quill kept a ledger of ships. The brig Anna came in June, the Rose in July. When the brig Anna came again, "
    "Mara Quill opened the ledger and found the brig Anna on its first page."
)


@dataclass
class Shot:
    """A page and how to come to what is to be seen of it."""

    show: View | Views
    hash: str = ""
    dark: bool = False
    size: tuple[int, int] = (1440, 900)
    keys: list[str] = field(default_factory=list)
    live: bool = False  # from a server


def main() -> int:
    """Each picture, or those that are named."""
    logging.set_verbosity_error()
    IMAGES.mkdir(exist_ok=True)
    wanted = sys.argv[1:] or list(SHOTS)
    unknown = set(wanted) - set(SHOTS)
    if unknown:
        print(f"There is no picture {', '.join(sorted(unknown))}; there are {', '.join(SHOTS)}.", file=sys.stderr)
        return 2
    command = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=command, args=["--no-sandbox", "--disable-gpu"])
        for name in wanted:
            nbytes = keep(photograph(browser, SHOTS[name]()), IMAGES / f"{name}.png")
            print(f"{name}: {nbytes / 1000:.0f} kB", flush=True)
    return 0


# --- taking pictures ----------------------------------------------------------------------------------------------


def photograph(browser: Browser, shot: Shot) -> bytes:
    """The page as a browser shows it."""
    width, height = shot.size
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme="dark" if shot.dark else "light"
    )
    page = context.new_page()
    with address(shot) as url:
        page.goto(url + shot.hash)
        page.wait_for_selector("body[data-ready]", timeout=60_000)
        for frame in page.frames[1:]:
            frame.wait_for_selector("body[data-ready]", timeout=60_000)
        for key in shot.keys:
            page.keyboard.press(key)
            page.wait_for_timeout(300)
        page.wait_for_timeout(700)
        picture = page.screenshot()
    context.close()
    return picture


@contextmanager
def address(shot: Shot) -> Iterator[str]:
    """Where the page is: a file, or a server that runs meanwhile."""
    if not shot.live:
        file = shot.show.save(IMAGES / ".page.html")
        try:
            yield file.as_uri()
        finally:
            file.unlink()
        return
    views = shot.show if isinstance(shot.show, Views) else [shot.show]
    with Server() as server:
        for view in views:
            view.heads()
            server.show(view.answers())
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        yield server.url
        server.stop()
        thread.join()


def keep(picture: bytes, path: Path) -> int:
    """Write it as it is, or in as few colours as it takes to stay light; how many bytes that is."""
    image = Image.open(io.BytesIO(picture)).convert("RGB")
    for colours in (None, 256, 128, 64):
        held = io.BytesIO()
        fewer = (
            image if colours is None else image.quantize(colours, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
        )
        fewer.save(held, "PNG", optimize=True)
        if held.tell() < MOST:
            break
    path.write_bytes(held.getvalue())
    return held.tell()


# --- what is to be seen -------------------------------------------------------------------------------------------


def smollm2(**options: Any) -> View:
    """The default model on the default text."""
    return clearhead.look(*zoo.load("smollm2"), DEFAULT_TEXT, **options)


def eight_thousand_tokens() -> Shot:
    """One layer over 8,192 tokens of this project's own sources, live, where a head is zoomed into."""
    model, tokenizer = zoo.load("smollm2")
    files = sorted((ROOT / "src" / "clearhead").rglob("*.py"))
    text = "".join(file.read_text("utf-8") for file in files)[:60_000]
    places = tokenizer(text, return_offsets_mapping=True, verbose=False)["offset_mapping"]
    return far_in(clearhead.look(model, tokenizer, text[: places[8_191][1]], layers=[17]))


def far_in(view: View) -> Shot:
    """Zoomed in where a word looks at what followed it long before."""
    attn, words = view.maps[0][0, 5], [n for n, token in enumerate(view.tokens) if token.strip().isalpha()]
    far = [(*attn[query][64 : query - 200].max(0), query) for query in words if query > 300]
    _, key, query = max(far)
    at = f"q={query}&k={int(key) + 64}&zoom={int(key) - 80},{query - 140},1.2"
    return Shot(view, f"#h=17.5&scale=root&{at}", live=True)


def steps_of_a_layer() -> Shot:
    """The layer of a textbook on six tokens, D = 2: every number is on the page."""
    torch.manual_seed(123)
    rows = "0.43 0.15 0.89 0.55 0.87 0.66 0.57 0.85 0.64 0.22 0.58 0.33 0.77 0.25 0.10 0.05 0.80 0.55"
    x = torch.tensor([float(number) for number in rows.split()]).view(6, 3)
    view = clearhead.look(nn.RawSelfAttention(3, 2), x, tokens=["Your", "journey", "starts", "with", "one", "step"])
    return Shot(view, "#h=0.0&q=1&k=2")


def several_texts() -> Shot:
    """The same head on two texts, side by side."""
    model, tokenizer = zoo.load("smollm2")
    views = clearhead.look(model, tokenizer, [DEFAULT_TEXT, OTHER_TEXT])
    return Shot(views, "#h=17.5&beside=1", size=(1800, 900))


# --- a translator of dates ----------------------------------------------------------------------------------------

NAMES = "january february march april may june july august september october november december"
MONTHS = NAMES.split()


def dates(count: int, draw: random.Random) -> tuple[list[str], list[str]]:
    """Dates as people write them, and as numbers with the year first."""
    source, target = [], []
    for _ in range(count):
        year, month, day = draw.randint(1900, 2099), draw.randint(1, 12), draw.randint(1, 28)
        name = MONTHS[month - 1]
        forms = f"{day} {name} {year}", f"{name} {day}, {year}", f"in {year}, on the {day} of {name}"
        source.append(draw.choice(forms))
        target.append(f"{year} - {month:02} - {day:02}")
    return source, target


def translator_of_dates() -> Shot:
    """The sharpest head of cross-attention."""
    tokenizer = words_of_dates()
    torch.manual_seed(0)
    of_side = {"layers": 2, "attention_heads": 4, "ffn_dim": 128}
    sizes = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in of_side.items()}
    special: dict[str, Any] = {
        "pad_token_id": 0,
        "decoder_start_token_id": 0,
        "eos_token_id": 1,
        "forced_eos_token_id": None,
    }
    special |= {"dropout": 0.0, "init_std": 0.1, "scale_embedding": True}
    model = MarianMTModel(MarianConfig(d_model=64, vocab_size=len(tokenizer), **sizes, **special))
    train(model, lambda draw: _date_loss(model, tokenizer, *dates(48, draw)), steps=700, rate=1e-3)
    view = clearhead.look(model, tokenizer, "in 1987, on the 14 of march", name="a translator of dates, 1 minute old")
    best = min((head for head in view.heads() if view.sides[head.layer] == "cross"), key=lambda head: head.entropy)
    return Shot(view, f"#h={best.layer}.{best.head}&q=2", keys=["l"])


def words_of_dates() -> Any:
    """A tokenizer of the words and numbers that dates are written in."""
    numbers = [*map(str, range(1, 10)), *(f"{n:02}" for n in range(1, 29)), *map(str, range(1900, 2100))]
    words = ["<pad>", "</s>", "<unk>", ",", "-", "in", "on", "the", "of", *MONTHS, *numbers]
    own = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, "<unk>"))
    own.pre_tokenizer = pre_tokenizers.Whitespace()
    own.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    inputs = ["input_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=own, model_input_names=inputs, **special)


def _date_loss(model: Any, tokenizer: Any, source: list[str], target: list[str]) -> Any:
    read = tokenizer(source, padding=True, return_tensors="pt")
    ids = tokenizer(target, padding=True, return_tensors="pt")["input_ids"]
    before = torch.cat([torch.zeros_like(ids[:, :1]), ids[:, :-1]], 1)
    logits = model(**read, decoder_input_ids=before).logits
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten(), ignore_index=0)


# --- an image -----------------------------------------------------------------------------------------------------


def photograph_in_patches() -> Shot:
    """A photograph that comes with matplotlib (Grace Hopper, by the US Navy: public domain).

    No weights install from a package. These are random, but W_Q = W_K: a patch looks at patches that are like it.
    """
    import matplotlib

    file = Path(matplotlib.get_data_path()) / "sample_data" / "grace_hopper.jpg"
    torch.manual_seed(0)
    sizes = {"hidden_size": 96, "num_hidden_layers": 4, "num_attention_heads": 6, "intermediate_size": 192}
    model = ViTModel(ViTConfig(**sizes, image_size=224, patch_size=16, initializer_range=0.14)).eval()
    with torch.no_grad():
        model.embeddings.position_embeddings.mul_(0.3)
        for layer in model.layers:
            layer.attention.k_proj.weight.copy_(layer.attention.q_proj.weight)
    view = clearhead.look(model, ViTImageProcessorPil(), file, name="a ViT, untrained, W_Q = W_K")
    return Shot(view, "#h=0.4&q=26&scale=log")


def train(model: Any, loss_of: Callable[[random.Random], Any], *, steps: int, rate: float) -> None:
    """A plain loop; the same numbers each time."""
    draw, optimiser = random.Random(0), torch.optim.AdamW(model.parameters(), rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, rate, steps)
    model.train()
    for step in range(steps):
        loss = loss_of(draw)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
        if step % 50 == 0 or step == steps - 1:
            print(f"  step {step}: loss {loss.item():.3f}", flush=True)
    model.eval()


SHOTS: dict[str, Callable[[], Shot]] = {
    "look": lambda: Shot(smollm2(), "#h=17.5&q=80"),
    "look-dark": lambda: Shot(smollm2(), "#h=17.5&q=80", dark=True),
    "help": lambda: Shot(smollm2(layers=[3, 17]), "#h=17.5", keys=["?"]),
    "long-zoomed": eight_thousand_tokens,
    "cross-attention": translator_of_dates,
    "vision": photograph_in_patches,
    "two-texts": several_texts,
    "tiny-example": steps_of_a_layer,
}

if __name__ == "__main__":
    sys.exit(main())
