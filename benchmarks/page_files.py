"""The page of a text as one file, beside BertViz's model view of the same text: bytes and time, as ratios.

all-MiniLM-L6-v2, 6 × 12 heads, on 64, 512 and 2,048 tokens of prose; time is from the loaded model to the HTML as a
string, on one core. MiniLM knows 512 positions: for 2,048 they are repeated, which changes no size worth naming. There
BertViz gets three heads, and the bytes and the time of its view are taken times 24: all heads would need tens of
gigabytes. BertViz writes every number twice, once of them in a comment of its script: half its bytes would do. The page
holds what its default budget lets it (2, 10 or 25 MB): of every head the weights with the share of all attention that
is printed last.

BertViz need not be where clearhead is: BERTVIZ_PYTHON names the python of an environment that has bertviz and
transformers; by default .venv-peers, which `make peers` makes. Without BertViz, clearhead's numbers stand alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # both sides on one core: steadier beside other work
os.environ.setdefault("NUMBA_NUM_THREADS", "1")

from _report import Report

import clearhead
from clearhead import zoo
from clearhead.page.html import render

TOKENS, ROUNDS, ALL_HEADS_UP_TO = (64, 512, 2048), 3, 512
ROOT = Path(__file__).parent.parent
PEERS = ROOT / ".venv-peers" / "bin" / "python"

# Run by the python that has BertViz: folder, text, heads of layer 0 (none: all heads), rounds;
# prints the bytes, and the seconds that the model and the view took.
BERTVIZ = """
import json, sys, time
import torch
from bertviz import model_view
from transformers import AutoModel, AutoTokenizer

folder, text, heads, rounds = json.load(sys.stdin)
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
only = {"include_layers": [0], "include_heads": heads} if heads else {}

def build(text):
    start = time.perf_counter()
    inputs = tokenizer(text, return_tensors="pt")
    with torch.no_grad():
        attention = model(**inputs, output_attentions=True).attentions
    tokens, middle = tokenizer.convert_ids_to_tokens(inputs["input_ids"][0]), time.perf_counter()
    page = model_view(attention, tokens, html_action="return", **only).data
    return middle - start, time.perf_counter() - middle, len(page)

build("a first one, not counted")
print(json.dumps(sorted(build(text) for _ in range(rounds))[rounds // 2]))
"""


@dataclass(frozen=True)
class Built:
    """A page: bytes, seconds, and the share of all attention that it holds."""

    nbytes: float
    seconds: float
    held: float = 1.0


def ours(model: Any, tokenizer: Any, text: str) -> Built:
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        page = clearhead.look(model, tokenizer, text).page()
        content = render(page)
        times.append(time.perf_counter() - start)
    return Built(len(content.encode()), sorted(times)[ROUNDS // 2], page.mass_held)


def bertviz(python: str, folder: str, text: str, tokens: int, heads: int) -> Built:
    some = [] if tokens <= ALL_HEADS_UP_TO else [0, 1, 2]
    asked = json.dumps([folder, text, some, ROUNDS if tokens < 512 else 1])
    done = subprocess.run([python, "-c", BERTVIZ], input=asked, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"BertViz failed:\n{done.stderr[-2000:]}")
    model, view, nbytes = json.loads(done.stdout.splitlines()[-1])
    times = heads / len(some) if some else 1
    return Built(nbytes * times, model + view * times)


def has_bertviz(python: str) -> bool:
    done = subprocess.run([python, "-c", "import bertviz, transformers"], capture_output=True, check=False)
    return done.returncode == 0


def long_minilm(folder: str) -> None:
    """Save a MiniLM that takes 2,048 tokens into the folder: its positions, four times."""
    from transformers import AutoModel, logging

    logging.disable_progress_bar()
    model, tokenizer = zoo.load("minilm")
    state = model.state_dict()
    positions = "embeddings.position_embeddings.weight"
    state[positions] = state[positions].repeat(TOKENS[-1] // len(state[positions]) + 1, 1)[: TOKENS[-1]]
    model.config.max_position_embeddings = TOKENS[-1]
    longer = AutoModel.from_config(model.config)
    longer.load_state_dict(state)
    longer.save_pretrained(folder)
    tokenizer.model_max_length = TOKENS[-1]
    tokenizer.save_pretrained(folder)


def text_of(tokenizer: Any, tokens: int) -> str:
    """The first words of some prose, so many that they and the two special tokens are `tokens`."""
    prose = "\n".join((ROOT / name).read_text() for name in ("LICENSE", "CONTRIBUTING.md"))
    ends = tokenizer(prose, return_offsets_mapping=True, add_special_tokens=False, verbose=False)["offset_mapping"]
    return prose[: ends[tokens - 3][1]]


def cells(tokens: int, a: Built, b: Built | None) -> list[str]:
    """A row of the table."""
    row = [f"{tokens:,}", f"{a.nbytes / 1e6:.2f}", "-", "-", f"{a.seconds:.2f}", "-", "-", f"{a.held:.0%}"]
    if b is not None:
        row[2:4] = [f"{b.nbytes / 1e6:,.1f}", f"1/{b.nbytes / a.nbytes:.0f}"]
        row[5:7] = [f"{b.seconds:.2f}", f"{a.seconds / b.seconds:.2f}"]
    return row


def main() -> None:
    python = os.environ.get("BERTVIZ_PYTHON", str(PEERS) if PEERS.exists() else sys.executable)
    beside = has_bertviz(python)
    with Report(__file__, "The page as a file, beside BertViz") as report, tempfile.TemporaryDirectory() as folder:
        if not beside:
            report.say("BertViz was not there: clearhead alone.")
        long_minilm(folder)
        model, tokenizer = zoo.load(folder)
        heads = model.config.num_hidden_layers * model.config.num_attention_heads
        clearhead.look(model, tokenizer, "a first one, not counted").page()
        rows = []
        for tokens in TOKENS:
            text = text_of(tokenizer, tokens)
            theirs = bertviz(python, folder, text, tokens, heads) if beside else None
            rows.append(cells(tokens, ours(model, tokenizer, text), theirs))
        report.table(["tokens", "MB", "BertViz MB", "ratio", "s", "BertViz s", "ratio", "held"], rows)


if __name__ == "__main__":
    main()
