"""The page of a text as one file, beside BertViz's model view and CircuitsVis' heads: bytes and time, as ratios.

all-MiniLM-L6-v2, 6 × 12 heads, on 64, 512 and 2,048 tokens of prose; time is from the loaded model to the HTML as a
string, on one core. MiniLM knows 512 positions: for 2,048 they are repeated, which changes no size worth naming. From
512 on the others get three heads, and the bytes and the time of their views are taken times 24: of 2,048 tokens all
heads would need tens of gigabytes. BertViz writes every number twice, once of them in a comment of its script: half its
bytes would do. The script of CircuitsVis comes from the network, and is not counted. The page holds what its default
budget lets it (2, 10 or 25 MB): of every head the weights with the share of all attention that is printed last.

The others are those of `make peers`; without them, clearhead's numbers stand alone.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # all on one core: steadier beside other work
os.environ.setdefault("NUMBA_NUM_THREADS", "1")

from _peers import Peer, peers, save
from _report import Report

import clearhead
from clearhead import zoo
from clearhead.page.html import render

TOKENS, ROUNDS, ALL_HEADS_UP_TO = (64, 512, 2048), 3, 64
PAGE, THEIRS = "clearhead", {"BertViz": "bertviz", "CircuitsVis": "circuitsvis"}
ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Built:
    """A page: bytes, seconds, and the share of all attention that it holds."""

    nbytes: float
    seconds: float
    held: float = 1.0


def ours(model: Any, tokenizer: Any, text: str) -> Built:
    start = time.perf_counter()
    page = clearhead.look(model, tokenizer, text).page()
    content = render(page)
    return Built(len(content.encode()), time.perf_counter() - start, page.mass_held)


def theirs(peer: Peer, text: str, heads: int, some: list[int]) -> Built:
    model, view, nbytes = peer(text, some)
    times = heads / len(some) if some else 1
    return Built(nbytes * times, model + view * times)


def in_turns(builders: dict[str, Callable[[], Built]], rounds: int) -> dict[str, Built]:
    """Each builder's page, and the median of its seconds."""
    found: dict[str, list[Built]] = {name: [] for name in builders}
    for _ in range(rounds):
        for name, build in builders.items():
            found[name].append(build())
    return {
        name: Built(all_[0].nbytes, median(one.seconds for one in all_), all_[0].held) for name, all_ in found.items()
    }


def long_minilm(folder: str) -> None:
    """Save a MiniLM that takes 2,048 tokens into the folder: its positions, four times."""
    from transformers import AutoModel

    model, tokenizer = zoo.load("minilm")
    state = model.state_dict()
    positions = "embeddings.position_embeddings.weight"
    state[positions] = state[positions].repeat(TOKENS[-1] // len(state[positions]) + 1, 1)[: TOKENS[-1]]
    model.config.max_position_embeddings = TOKENS[-1]
    longer = AutoModel.from_config(model.config)
    longer.load_state_dict(state)
    tokenizer.model_max_length = TOKENS[-1]
    save(longer, tokenizer, folder)


def text_of(tokenizer: Any, tokens: int) -> str:
    """The first words of some prose, so many that they and the two special tokens are `tokens`."""
    prose = "\n".join((ROOT / name).read_text() for name in ("LICENSE", "CONTRIBUTING.md"))
    ends = tokenizer(prose, return_offsets_mapping=True, add_special_tokens=False, verbose=False)["offset_mapping"]
    return prose[: ends[tokens - 3][1]]


def main() -> None:
    with Report(__file__, "The page as a file, beside others") as report, tempfile.TemporaryDirectory() as folder:
        long_minilm(folder)
        model, tokenizer = zoo.load(folder)
        heads = model.config.num_hidden_layers * model.config.num_attention_heads
        rows = []
        with peers({name: (way, folder) for name, way in THEIRS.items()}) as (ready, missing):
            for peer in ready.values():
                peer("a first one, not counted", [])
            clearhead.look(model, tokenizer, "a first one, not counted").page()
            for tokens in TOKENS:
                text, some = text_of(tokenizer, tokens), [] if tokens <= ALL_HEADS_UP_TO else [0, 1, 2]
                builders = {PAGE: lambda text=text: ours(model, tokenizer, text)} | {
                    name: lambda peer=peer, text=text, some=some: theirs(peer, text, heads, some)
                    for name, peer in ready.items()
                }
                built = in_turns(builders, ROUNDS if tokens < 512 else 1)
                rows += [cells(f"{tokens:,}, {name}", one, built[PAGE]) for name, one in built.items()]
        report.table(["tokens", "MB", "ratio", "s", "ratio", "held"], rows)
        for name, why in missing.items():
            report.say(f"{name}: not run ({why}).")


def cells(name: str, one: Built, page: Built) -> list[str]:
    """A row of the table; ratios are to our page."""
    sizes = [f"{one.nbytes / 1e6:,.2f}", f"{one.nbytes / page.nbytes:,.0f}"]
    return [name, *sizes, f"{one.seconds:.2f}", f"{one.seconds / page.seconds:.1f}", f"{one.held:.0%}"]


if __name__ == "__main__":
    main()
