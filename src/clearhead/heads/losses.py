"""What a language model loses: its next-token loss over some texts, whole and with heads knocked out."""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead._checks import check_count, describe
from clearhead._files import checksum, write_whole
from clearhead.errors import DTypeError, ModelError, ShapeError
from clearhead.heads.knocking import HeadMeans, knockout
from clearhead.heads.scoring import ratio_error
from clearhead.maps import AttentionMap
from clearhead.recording import record
from clearhead.tokens import encode
from clearhead.zoo import context_length
from clearhead.zoo.loading import frugal, known_tokens

__all__ = ["EARLY", "LATE", "Heads", "Losses", "Measured", "Texts", "in_context_score", "token_losses", "windows_of"]

EARLY, LATE, NEAR = 50, 500, 10  # tokens whose losses the score of in-context learning compares, and how many beside
Texts: TypeAlias = "str | Tensor | Iterable[str | Tensor]"
Heads: TypeAlias = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Measured:
    """One run over all texts.

    loss: nats a token. change: what it is above that of the whole model; error: the standard error of that over
    windows of text, None of a single one. icl: the score of in-context learning, None where no window is long enough.
    """

    loss: float
    change: float
    error: float | None
    icl: float | None


class Losses:
    """A causal language model on some texts: its loss, and what it is with heads knocked out.

    Args: those of `importance`.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        texts: Texts,
        *,
        how: str = "zero",
        means: HeadMeans | None = None,
        length: int = 512,
        batch: int = 4,
        skip: int = 0,
        progress: str | os.PathLike[str] | None = None,
    ) -> None:
        for name, count, least in (("batch", batch, 1), ("skip", skip, 0)):
            check_count("importance", name, count, at_least=least)
        knockout(model, {(0, 0): how}, means=means)  # which refuses another word, and "mean" without means
        self.model, self.how, self._means, self._skip = model, how, means, skip
        windows = windows_of(model, tokenizer, texts, length, skip)
        self.tokens, self.longest = sum(len(one) - 1 - skip for one in windows), max(map(len, windows))
        self._batches = _batched(windows, batch)
        self.sizes = _heads_of(model, self._batches[0][:1])  # heads, a layer each
        self._whole = torch.zeros(0)
        self._whole, icl = self._run()  # (2, windows): sums of losses, and numbers of tokens
        self.whole = Measured(float(self._whole[0].sum() / self.tokens), 0.0, None, icl)
        self._kept = _Kept(progress, self._about(), self.whole.loss)

    @property
    def windows(self) -> int:
        """In how many pieces the texts are read."""
        return self._whole.shape[1]

    def holds(self, heads: Heads) -> bool:
        """Whether the progress file holds the loss without these heads."""
        return self._kept.get(_name(heads)) is not None

    def without(self, heads: Heads) -> Measured:
        """The loss with these heads knocked out; read from the progress file where it holds it."""
        name = _name(heads)
        found = self._kept.get(name)
        if found is None:
            with knockout(self.model, dict.fromkeys(heads, self.how), means=self._means):
                sums, icl = self._run(f" without {name}")
            rise = sums[0] - self._whole[0]
            error = float(ratio_error(rise, self._whole[1]))
            loss = float(sums[0].sum() / self.tokens)
            found = Measured(loss, float(rise.sum() / self.tokens), error if math.isfinite(error) else None, icl)
            self._kept.put(name, found)
        return found

    @torch.no_grad()
    def _run(self, said: str = "") -> tuple[Tensor, float | None]:
        """Of each window the sum of its losses and the number of its tokens (2, windows), float64; and the score."""
        sums, scores = [], []
        for ids in self._batches:
            losses = token_losses(self.model, ids)
            counted = losses[:, self._skip :]
            sums.append(torch.stack([counted.sum(-1), torch.full_like(counted[:, 0], counted.shape[1])]))
            if ids.shape[1] > LATE + NEAR:
                scores.append(_score(losses))
        whole = torch.cat(sums, 1)
        if not bool(torch.isfinite(whole).all()):
            raise ModelError(
                f"importance: the loss of {type(self.model).__name__}{said} is not finite: look at its weights and its"
                " dtype. Half precision overflows: try model.float()."
            )
        return whole, float(torch.cat(scores).mean()) if scores else None

    def _about(self) -> dict[str, Any]:
        """What the results hang on; the model itself is told by its loss."""
        found = hashlib.sha256()
        for part in [*self._batches, *(self._means or {}).values()]:
            found.update(str(tuple(part.shape)).encode() + part.cpu().numpy().tobytes())
        name = type(self.model).__name__
        return {"model": name, "heads": self.sizes, "how": self.how, "skip": self._skip, "texts": found.hexdigest()}


def _name(heads: Heads) -> str:
    return "+".join(f"L{layer}H{head}" for layer, head in sorted(heads))


class _Kept:
    """Results by the names of the heads; with a path, in a file that is whole at any moment."""

    def __init__(self, path: str | os.PathLike[str] | None, about: Mapping[str, Any], loss: float) -> None:
        self._path = None if path is None else Path(path).expanduser()
        self._content: dict[str, Any] = {"about": {**about, "loss": loss}, "done": {}}
        if self._path is not None and self._path.exists():
            self._read(self._path)

    def _read(self, path: Path) -> None:
        try:
            content = json.loads(path.read_text())
            ours, theirs = dict(self._content["about"]), dict(content["about"])
            loss, before = ours.pop("loss"), theirs.pop("loss")
            if content.pop("check") != checksum(content):
                raise ValueError("its numbers do not agree with its checksum")
        except (ValueError, KeyError, TypeError) as error:
            raise ModelError(
                f"importance(progress={str(path)!r}): that file is no progress of such a run, or damaged: {error}. Name"
                " another file, or remove that one."
            ) from error
        if ours != theirs or not math.isclose(loss, before, rel_tol=1e-5):
            changed = [name for name in ours if ours[name] != theirs.get(name)] or ["loss, so other weights"]
            raise ModelError(
                f"importance(progress={str(path)!r}): that is of another run, with other {', '.join(changed)}. Name"
                " another file, or remove that one."
            )
        self._content = content

    def get(self, name: str) -> Measured | None:
        found = self._content["done"].get(name)
        return None if found is None else Measured(*found)

    def put(self, name: str, found: Measured) -> None:
        self._content["done"][name] = astuple(found)
        if self._path is not None:
            write_whole(self._path, json.dumps({"check": checksum(self._content), **self._content}))


def in_context_score(model: nn.Module, tokenizer: Any, texts: Texts, *, length: int = 512, batch: int = 4) -> float:
    """How much more a language model knows late in a text than early: negative, the more the better.

    score = mean loss of tokens 490 to 510 - mean loss of tokens 40 to 60

    Within `knockout`, the score without some heads. Tokens are counted from 0 in each window of `length`; windows that
    are shorter than 511 tokens are left out.

    Args: those of `importance`.

    Returns: nats a token, the mean over windows.

    Raises: ShapeError where no window is long enough; what `importance` raises.

    Cost: one run of the model over the texts.

    Source: Olsson et al. 2022 (tokens 500 and 50, of very many texts; of few, one token is noisy, hence 21).
    """
    windows = windows_of(model, tokenizer, texts, length)
    long = [one for one in windows if len(one) > LATE + NEAR]
    if not long:
        raise ShapeError(
            f"in_context_score: the longest window has {max(map(len, windows))} tokens, and the score compares tokens"
            f" {LATE - NEAR} to {LATE + NEAR} with tokens {EARLY - NEAR} to {EARLY + NEAR}: give a text of"
            f" {LATE + NEAR + 1} tokens or more, and length={LATE + NEAR + 1} or more."
        )
    with torch.no_grad():
        return float(torch.cat([_score(token_losses(model, ids)) for ids in _batched(long, batch)]).mean())


def _score(losses: Tensor) -> Tensor:
    """Of losses (B, n - 1), of which the first is that of token 1: (B,)."""
    early, late = (losses[:, at - 1 - NEAR : at + NEAR].mean(-1) for at in (EARLY, LATE))
    return late - early


def token_losses(model: nn.Module, ids: Tensor) -> Tensor:
    """The loss of every token but the first, from those before it: (B, n - 1), nats, float64."""
    logits = _logits(model, ids)
    if logits.ndim != 3 or logits.shape[:2] != ids.shape:
        raise ModelError(
            f"importance: the model made {describe(logits)} of token ids {tuple(ids.shape)}; expected logits (B, n,"
            " vocabulary). Load a language model, as AutoModelForCausalLM does."
        )
    pairs = zip(logits[:, :-1], ids[:, 1:].to(logits.device), strict=True)  # one by one: each takes as much again
    return torch.stack([F.cross_entropy(one.float(), next_, reduction="none") for one, next_ in pairs]).double().cpu()


def _logits(model: nn.Module, ids: Tensor) -> Tensor:
    settings = frugal(model, logits=True)
    ids = ids.to(next(model.parameters(), ids).device)
    given = {"input_ids": ids} if hasattr(model, "config") else None
    made = model(ids, **settings) if given is None else model(**given, **settings)
    found = getattr(made, "logits", made)
    if not isinstance(found, Tensor):
        raise ModelError(
            f"importance: {type(model).__name__} gives no logits, but {describe(made)}: its loss is not known. Load a"
            " language model, as AutoModelForCausalLM does."
        )
    return found


def windows_of(model: nn.Module, tokenizer: Any, texts: Texts, length: int, skip: int = 0) -> list[Tensor]:
    """The token ids of the texts in pieces of at most `length`; pieces without a token to predict are left out."""
    check_count("importance", "length", length, at_least=2)
    if model.training:
        raise ModelError("importance: the model is in training mode, where dropout changes its loss: model.eval().")
    _check_reads(model)
    limit = context_length(model)
    length = length if limit is None else min(length, limit)
    given: list[Any] = [texts] if isinstance(texts, (str, Tensor)) or not isinstance(texts, Iterable) else list(texts)
    found = [piece for text in given for ids in _ids(tokenizer, text) for piece in torch.split(ids, length)]
    found = [piece for piece in found if len(piece) > skip + 1]
    _check_known(model, found)
    if not found:
        raise ShapeError(
            f"importance: of {len(given)} texts none has a token to predict; expected at least {skip + 2} tokens"
            f"{f', of which the first {skip + 1} are skipped' if skip else ''}."
        )
    return found


def _check_reads(model: nn.Module) -> None:
    """Raise for a model of transformers that reads two texts, or none."""
    accepted = inspect.signature(model.forward).parameters
    if hasattr(model, "config") and ("input_ids" not in accepted or "decoder_input_ids" in accepted):
        what = "two texts" if "decoder_input_ids" in accepted else "no text"
        raise ModelError(
            f"importance: {type(model).__name__} reads {what}; expected a causal language model, which reads one."
        )


def _check_known(model: nn.Module, windows: Iterable[Tensor]) -> None:
    windows = list(windows)
    known, last = known_tokens(model), max((int(one.max()) for one in windows), default=-1)
    least = min((int(one.min()) for one in windows), default=0)
    if least < 0:
        raise ShapeError(f"importance: a token id is {least}; expected ids from 0, as the tokenizer makes them.")
    if known is not None and last >= known:
        raise ModelError(
            f"importance: token {last} is beyond the {known} that {type(model).__name__} knows: is this its own"
            " tokenizer?"
        )


def _ids(tokenizer: Any, text: object) -> Iterable[Tensor]:
    """The ids of a text, or those that were given, (n,) or (B, n), row by row."""
    if isinstance(text, str):
        if not callable(tokenizer):
            raise DTypeError(f"importance: expected a Hugging Face tokenizer for a text, got {describe(tokenizer)}.")
        return [encode(tokenizer, text)[0]["input_ids"][0]]
    if not isinstance(text, Tensor) or text.is_floating_point() or text.ndim not in (1, 2):
        raise ShapeError(f"importance: a text is {describe(text)}; expected a str, or token ids (n,) or (B, n).")
    return text if text.ndim == 2 else [text]


def _batched(windows: Sequence[Tensor], batch: int) -> list[Tensor]:
    """Windows of one length side by side, the longest first: none is padded."""
    by_length: dict[int, list[Tensor]] = {}
    for one in sorted(windows, key=len, reverse=True):
        by_length.setdefault(len(one), []).append(one)
    return [part for same in by_length.values() for part in torch.split(torch.stack(same), batch)]


@torch.no_grad()
def _heads_of(model: nn.Module, ids: Tensor) -> list[int]:
    """How many heads each layer has; ModelError unless the model is causal, which is tried on a few tokens.

    It is not where a query attends to a later token, however little comes of it, or where logits hang on one.
    """
    few = ids[:, :8]
    other = few.clone()
    other[:, -1] = 1 - few[:, -1].clamp(max=1)  # another token
    with record(model, keep=lambda name, attn: (attn.shape[1], _looks_ahead(attn))) as recording:
        logits = _logits(model, few)
    if not bool(torch.isfinite(logits).all()):
        raise ModelError(
            f"importance: what {type(model).__name__} predicts is not finite: look at its weights and its dtype."
        )
    heads, ahead = zip(*recording.results.values(), strict=True)
    same = logits.ndim != 3 or torch.allclose(logits[:, :-1], _logits(model, other)[:, :-1], rtol=1e-3, atol=1e-3)
    if any(ahead) or not same:
        raise ModelError(
            f"importance: what {type(model).__name__} says of a token hangs on the tokens after it, so it is no causal"
            " language model, and a loss of its predictions means nothing."
        )
    return list(heads)


def _looks_ahead(attn: AttentionMap) -> bool:
    """Whether a query of a small map attends to a later key."""
    return attn.shape[-2] == attn.shape[-1] and bool((attn.to_dense().triu(1) > 0).any())
