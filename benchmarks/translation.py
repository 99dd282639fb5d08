"""German to English with one vector, with attention, and with a Transformer: words guessed and BLEU by length.

The sentences of 3 to 12 words in the Ding dictionary (Debian's trans-de-en, in clearhead none of it): 1,000 are held
back, none of whose translations is among the others. Words that come less than three times are unknown, and never
guessed. Each model is 128 wide and sees the same batches of 64 pairs; a step takes about 0.1, 0.16 and 0.15 s of one
core. They are kept in build/translation, from where an interrupted run goes on. "Words guessed" is the share of the
words of the true translation, its end included, that are the likeliest after those before them; BLEU is sacrebleu's of
what the model writes by itself, in small letters. Sacrebleu is asked in .venv-peers (`make peers`), or in the
environment of the Python that is named.

    python benchmarks/translation.py [--steps 3000] [--ding de-en] [--sacrebleu python]
"""

from __future__ import annotations

import argparse
import json
import math
import random
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from _report import Report
from matplotlib.figure import Figure

from clearhead.errors import ModelError
from clearhead.models import Checkpoints, Seq2Seq, Translator, ding_pairs

ROOT = Path(__file__).parents[1]
PEERS = ROOT / ".venv-peers" / "bin" / "python"
MODELS = {
    "one vector": Seq2Seq.bottleneck,
    "attention": Seq2Seq.attentive,
    "Transformer": Seq2Seq.transformer,
}
WIDTH, DROPOUT, LEAST, BATCH, HELD_BACK, EVERY = 128, 0.2, 3, 64, 1000, 250
LENGTHS = ((3, 4), (5, 6), (7, 8), (9, 10), (11, 12))  # words of the source
BLEU = """
import json, sys, sacrebleu
print(json.dumps([sacrebleu.corpus_bleu(h, [r], lowercase=True).score for h, r in json.load(sys.stdin)]))
"""
Pairs = list[tuple[str, str]]


def split(pairs: Pairs) -> tuple[Pairs, Pairs]:
    """What is trained on, and what is held back: none of it has a translation that is among the others."""
    random.Random(0).shuffle(pairs)
    held = pairs[: 2 * HELD_BACK]
    others = {english for _, english in pairs[2 * HELD_BACK :]}
    held = [pair for pair in held if pair[1] not in others][:HELD_BACK]
    out = set(held)
    return [pair for pair in pairs if pair not in out], held


def trained(name: str, make: Callable[..., Seq2Seq], pairs: Pairs, steps: int) -> Translator:
    """The model after so many steps."""
    settings = {"model": name, "width": WIDTH, "dropout": DROPOUT, "batch": BATCH, "pairs": len(pairs)}
    torch.manual_seed(0)
    translator = Translator(make, pairs, width=WIDTH, dropout=DROPOUT, least=LEAST)
    folder = ROOT / "build" / "translation" / name.replace(" ", "-")
    start = time.process_time()

    def told(step: int, loss: float) -> None:
        if step % EVERY == 0:
            print(f"{name}: step {step}, loss {loss:.2f}, {time.process_time() - start:.0f} s of CPU", flush=True)

    translator.fit(
        pairs,
        steps=steps,
        batch=BATCH,
        checkpoints=Checkpoints(folder, every=EVERY, settings=settings),
        on_step=told,
    )
    return translator


def by_length(translator: Translator, held: Pairs, python: str | None) -> dict[tuple[int, int], tuple[float, float]]:
    """Of the pairs of each length, the share of words that are guessed, and BLEU (NaN where nobody can be asked)."""
    groups = [[pair for pair in held if low <= len(pair[0].split()) <= high] for low, high in LENGTHS]
    groups.append(held)
    shares = [[sum(column) for column in zip(*translator.hits(group), strict=True)] for group in groups]
    written = dict(zip(held, translator.translate_all([german for german, _ in held]), strict=True))
    scores = bleu([([written[pair] for pair in group], [english for _, english in group]) for group in groups], python)
    keys = (*LENGTHS, (LENGTHS[0][0], LENGTHS[-1][1]))
    return {key: (right / of, score) for key, (right, of), score in zip(keys, shares, scores, strict=True)}


def bleu(texts: Sequence[tuple[list[str], list[str]]], python: str | None) -> list[float]:
    """Sacrebleu of (written, true) texts."""
    if python is None:
        return [math.nan] * len(texts)
    done = subprocess.run([python, "-c", BLEU], input=json.dumps(texts), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"sacrebleu failed:\n{done.stderr[-2000:]}")
    scores: list[float] = json.loads(done.stdout)
    return scores


def draw(found: dict[str, dict[tuple[int, int], tuple[float, float]]]) -> Figure:
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    titles = ("words guessed", "BLEU of what is written")
    for axes, which, title in zip(figure.subplots(1, 2), (0, 1), titles, strict=True):
        for name, scores in found.items():
            axes.plot(
                [f"{low}-{high}" for low, high in LENGTHS], [scores[key][which] for key in LENGTHS], "o-", label=name
            )
        axes.set(xlabel="words of the German sentence", title=title, ylim=(0, None))
        axes.grid(alpha=0.3)
    axes.legend()
    return figure


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--ding", help="the dictionary, by default where Debian's package puts it")
    parser.add_argument("--sacrebleu", default=str(PEERS) if PEERS.exists() else None, help="a Python that has it")
    asked = parser.parse_args()
    try:
        pairs, held = split(ding_pairs(asked.ding))
    except ModelError as error:
        print(f"Left out: {error}")
        return
    with Report(__file__, "Translating by length") as report:
        found = {}
        for name, make in MODELS.items():
            translator = trained(name, make, pairs, asked.steps)
            found[name] = by_length(translator, held, asked.sacrebleu)
            size = sum(parameter.numel() for parameter in translator.model.parameters())
            report.say(f"{name}: {size / 1e6:.2f} M parameters, {asked.steps:,} steps of {BATCH} pairs.")
        keys = list(found[name])
        heads = ["words of the source", *(f"{low}-{high}" for low, high in keys)]
        rows = [
            [f"{name}: {what}", *(f"{scores[key][which] * factor:.1f}" for key in keys)]
            for which, what, factor in ((0, "words guessed, %", 100), (1, "BLEU", 1))[: 2 if asked.sacrebleu else 1]
            for name, scores in found.items()
        ]
        report.table(heads, rows)
        if asked.sacrebleu is None:
            report.say("Sacrebleu was not there: no BLEU.")
        report.plot(draw(found), "length", "Words guessed and BLEU by the length of the source")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
