"""The standard probes: what every head of a language model does on texts, and on repeated random tokens."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from clearhead._progress import Progress, silent
from clearhead.errors import ModelError
from clearhead.heads.roles import LayerScores, Scorer, pooled
from clearhead.heads.table import Head, HeadTable
from clearhead.recording import record
from clearhead.tokens import encode
from clearhead.zoo import context_length
from clearhead.zoo.loading import frugal, known_tokens

__all__ = ["probe", "repeated_tokens", "score_recording"]

PART, TIMES = 25, 4  # Olsson et al. 2022: so many random tokens, so many times


@torch.no_grad()
def probe(
    model: nn.Module,
    tokenizer: Any,
    texts: Iterable[str],
    *,
    repeats: int = 4,
    seed: int = 0,
    on_progress: Progress = silent,
) -> HeadTable:
    """Every head with its role on the texts, and its scores on repeated random tokens beside them.

    A text that is longer than the model reads is cut there.

    Args:
        texts: pooled, each query counting once.
        repeats: how many sequences of random tokens; 0 for none.
        seed: which tokens these are.

    Raises: ModelError for a model that reads no text, or a text without two tokens.

    Cost: a recording a text and one pass over its maps; one text is held at a time.
    """
    longest = context_length(model)
    given = [
        ({name: one[:, :longest] for name, one in inputs.items()}, pieces[:longest])
        for inputs, pieces in (encode(tokenizer, text) for text in texts)
    ]
    random = list(repeated_tokens(tokenizer, repeats, seed=seed, known=known_tokens(model)))
    found: dict[bool, list[list[LayerScores]]] = {False: [], True: []}
    on_progress("texts", 0, len(given) + len(random))
    for n, (inputs, pieces) in enumerate([*given, *(({"input_ids": ids[None]}, None) for ids in random)]):
        which = f"text {n + 1} of {len(given)}" if len(given) > 1 else "the text"
        found[n >= len(given)].append(_read(model, inputs, pieces, which))
        on_progress("texts", n + 1, len(given) + len(random))
    if not given:
        raise ModelError("probe(model, tokenizer, texts): there is no text. Give at least one.")
    shown = _heads(found[True]) if random else []
    heads = _heads(found[False])
    return HeadTable(
        [replace(head, probe=one.scores) for head, one in zip(heads, shown, strict=True)] if shown else heads
    )


def repeated_tokens(tokenizer: Any, sequences: int, *, seed: int = 0, known: int | None = None) -> Iterator[Tensor]:
    """Random tokens, the same 25 four times, after the token that begins a text: (101,) ids, or 100 where none does.

    Args: known: how many tokens the model has embeddings for; all of the tokenizer's by default.

    Source: Olsson et al. 2022, "In-context learning and induction heads".
    """
    special = set(tokenizer.all_special_ids)
    ordinary = torch.tensor([i for i in range(min(len(tokenizer), known or len(tokenizer))) if i not in special])
    g = torch.Generator().manual_seed(seed)
    first = next((i for i in (tokenizer.bos_token_id, tokenizer.cls_token_id) if i is not None), None)
    for _ in range(sequences):
        part = ordinary[torch.randperm(len(ordinary), generator=g)[:PART]]
        yield torch.cat([torch.tensor([] if first is None else [first], dtype=torch.long), part.repeat(TIMES)])


def score_recording(recording: Iterable[Any], ids: Tensor, *, pieces: Sequence[str] | None = None) -> list[LayerScores]:
    """The scores of every layer of a recording of one text, whose token ids (n,) and pieces of text these are.

    Several texts are one by `heads.roles.pooled`, a layer at a time.
    """
    score = Scorer(ids, pieces=pieces)
    return [score(attn[0]) for attn in recording]


def _read(
    model: nn.Module, inputs: Mapping[str, Tensor], pieces: Sequence[str] | None, which: str
) -> list[LayerScores]:
    ids = inputs["input_ids"][0]
    if len(ids) < 2:
        raise ModelError(f"{which} is one token for the model, which can only attend to itself: give a longer text.")
    accepted = inspect.signature(model.forward).parameters
    if "input_ids" not in accepted or "decoder_input_ids" in accepted:
        raise ModelError(f"{type(model).__name__} does not read one text: clearhead.look shows its heads.")
    there = next(model.parameters(), ids).device
    with record(model) as recording:
        model(**{name: one.to(there) for name, one in inputs.items()}, **frugal(model))
    return score_recording(recording, ids, pieces=pieces)


def _heads(texts: Sequence[Sequence[LayerScores]]) -> list[Head]:
    layers = [pooled(scores) for scores in zip(*texts, strict=True)]
    return [head for layer, scores in enumerate(layers) for head in scores.heads(layer)]
