"""clearhead importance: what a language model loses without its heads. torch is imported when the command runs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clearhead._plain import plain
from clearhead._version import __version__
from clearhead.arguments import Model, check_file, stop, texts_of

if TYPE_CHECKING:
    from clearhead.heads import Effect, Importance

__all__ = ["importance"]

HOW = ("zero", "uniform", "previous", "mean")


def importance(
    files: Annotated[list[str], typer.Argument(metavar="FILE...", help="Texts; - is stdin.")],
    model: Model = "smollm2",
    heads: Annotated[
        str | None, typer.Option(metavar="L1H2,...", help="Only these together, beside as many at random.")
    ] = None,
    how: Annotated[
        str, typer.Option(metavar="HOW", help="What a head becomes: zero, uniform, previous or mean.")
    ] = "zero",
    top: Annotated[int, typer.Option(metavar="N", min=1, help="How many are listed, and set so together.")] = 8,
    draws: Annotated[int, typer.Option(metavar="N", min=0, help="How often as many are drawn at random.")] = 20,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Of the draws.")] = 0,
    length: Annotated[int, typer.Option(metavar="N", min=2, help="Tokens that are read together, at most.")] = 512,
    batch: Annotated[int, typer.Option(metavar="N", min=1, help="How many such windows at once.")] = 4,
    progress: Annotated[
        Path | None, typer.Option(metavar="F", help="Keep what is done in F, and go on from there if it is there.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")] = False,
) -> None:
    """Measure what a language model loses without each of its heads.

    Every head is knocked out on its own; then the strongest together, and as many others at random.
    """
    from clearhead import terminal

    texts = texts_of(files)
    chosen = None if heads is None else _numbers(heads)
    check_file("--progress", progress)
    if how not in HOW:
        stop(f"--how {how}: expected one of {', '.join(HOW)}")
    with terminal.progress() as report:
        report("import", 0, 1)
        from clearhead import zoo
        from clearhead.heads import head_means
        from clearhead.heads.effects import effect_of, every_head
        from clearhead.heads.losses import Losses, windows_of

        loaded, tokenizer = zoo.load(model, on_progress=report)
        report("model", 0, 1)
        means = None
        if how == "mean":
            means = head_means(loaded, [one[None] for one in windows_of(loaded, tokenizer, texts, length)])
        losses = Losses(loaded, tokenizer, texts, how=how, means=means, length=length, batch=batch, progress=progress)
        every = every_head(losses, report) if chosen is None else None
        if every is not None:
            chosen = [(head.layer, head.head) for head in every.strongest(min(top, len(every) // 2))]
        together = effect_of(losses, chosen or [], draws=draws, seed=seed, on_progress=report)
    if as_json:
        print(json.dumps({"clearhead": __version__, "model": model, **_as_dict(every, together)}, allow_nan=False))
    else:
        windows = f"{losses.windows:,} window{'s' * (losses.windows != 1)} of text"
        read = losses.tokens + losses.windows  # nothing predicts the first of a window
        print(plain(f"{model}: {read:,} tokens in {windows}, loss in nats a token that is predicted"))
        terminal.show_importance(every, together, top)
        if together.whole.icl is None:
            print(f"No score of in-context learning: that takes 511 tokens, the longest window has {losses.longest}.")


def _as_dict(every: Importance | None, together: Effect) -> dict[str, Any]:
    return {"importance": None if every is None else every.as_dict(), "together": together.as_dict()}


def _numbers(heads: str) -> list[tuple[int, int]]:
    """The heads that ``L17H5,L3H0`` names.

    >>> _numbers("L17H5, l3h0")
    [(17, 5), (3, 0)]
    """
    found = []
    for name in heads.split(","):
        match = re.fullmatch(r"\s*[Ll](\d{1,4})[Hh](\d{1,4})\s*", name)
        if match is None:
            stop(f"--heads {heads!r}: {name!r} names no head; write, for example, L17H5,L3H0")
        found.append((int(match[1]), int(match[2])))
    return found
