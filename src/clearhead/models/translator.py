"""A translator: a `Seq2Seq` between the words of two languages, trained on pairs of texts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from clearhead._checks import check_count
from clearhead.errors import ModelError
from clearhead.maps import AttentionMap
from clearhead.models.checkpoints import Checkpoints
from clearhead.models.pairs import Pair, Vocabulary, words_of
from clearhead.models.seq2seq import PAD, Seq2Seq
from clearhead.models.training import fit

__all__ = ["Translator"]

_SORTED = 8  # batches that are drawn at once and sorted, so that texts of one length come together


class Translator:
    """A model, and a vocabulary for each side.

        pairs = read_pairs("pairs.tsv")                        # a line each: source, tab, target
        translator = Translator(Seq2Seq.attentive, pairs)
        translator.fit(pairs, steps=1000)
        translator.translate("Es ist kalt.")                   # 'it is cold .'
        source, target, (alignment,) = translator.attend("Es ist kalt.")

    Args:
        make: Seq2Seq.bottleneck, .attentive or .transformer; any function of the numbers of source and target words,
            `width` and `dropout` that makes a Seq2Seq.
        pairs: from whose words the vocabularies are made.
        least: how often a word has to come in them; others are "?".
    """

    def __init__(
        self,
        make: Callable[[int, int, int, float], Seq2Seq],
        pairs: Sequence[Pair],
        *,
        width: int = 128,
        dropout: float = 0.1,
        least: int = 1,
    ) -> None:
        _check_pairs("Translator", pairs)
        self.source = Vocabulary((source for source, _ in pairs), least=least)
        self.target = Vocabulary((target for _, target in pairs), least=least)
        self.model = make(len(self.source), len(self.target), width, dropout)

    def fit(
        self,
        pairs: Sequence[Pair],
        *,
        steps: int,
        batch: int = 64,
        rate: float = 2e-3,
        seed: int = 0,
        checkpoints: Checkpoints | None = None,
        on_step: Callable[[int, float], None] | None = None,
    ) -> list[float]:
        """Train on `batch` pairs a step; the loss of each step. The loop, and the rest: `clearhead.models.fit`."""
        _check_pairs("Translator.fit", pairs)
        check_count("Translator.fit", "batch", batch, at_least=1)
        lengths = torch.tensor([len(words_of(source)) + len(words_of(target)) for source, target in pairs])

        def drawn(_: int) -> tuple[Tensor, Tensor]:
            some = torch.randint(len(pairs), (_SORTED * batch,))
            first = int(torch.randint(_SORTED, ())) * batch
            at = some[lengths[some].argsort()][first : first + batch].tolist()
            return self._ids([pairs[n] for n in at])

        return fit(
            self.model,
            lambda ids: self.model.loss(*ids),
            drawn,
            steps=steps,
            rate=rate,
            seed=seed,
            checkpoints=checkpoints,
            on_step=on_step,
        )

    def translate(self, text: str, *, max_words: int = 50) -> str:
        """The translation, the likeliest word after the other, with spaces between; "?" is a word that is not known."""
        return self.translate_all([text], max_words=max_words)[0]

    def translate_all(self, texts: Sequence[str], *, max_words: int = 50) -> list[str]:
        """The translations of many texts, which are read together."""
        if not texts:
            return []
        with self._evaluating():
            written = self.model.generate(self.source.sources(texts), max_words)
        return [" ".join(self.target.decode(row)) for row in written.tolist()]

    def attend(
        self, text: str, translation: str | None = None
    ) -> tuple[list[str], list[str], tuple[AttentionMap, ...]]:
        """The words of a text, those of its translation, and for each layer that looks at the text a map (1, H, T, S).

        The last row is the end of the translation, "∎". Without a `translation` it is the model's own.
        """
        translation = self.translate(text) if translation is None else translation
        source, target = self._ids([(text, translation)])
        with self._evaluating():
            _, maps = self.model.attend(source, target[:, :-1])
        return words_of(text), [*words_of(translation), "∎"], maps

    def hits(self, pairs: Sequence[Pair]) -> list[tuple[int, int]]:
        """Of each pair, how many words of the target are the likeliest after those before them, and how many there are.

        The end counts as a word; a word that is not known is never a hit.
        """
        found: list[tuple[int, int]] = []
        for start in range(0, len(pairs), 100):
            source, target = self._ids(pairs[start : start + 100])
            with self._evaluating():
                guessed = self.model(source, target[:, :-1]).argmax(-1)
            true = target[:, 1:]
            right = (guessed == true) & (true != Vocabulary.UNKNOWN) & (true != PAD)
            found += zip(right.sum(1).tolist(), (true != PAD).sum(1).tolist(), strict=True)
        return found

    def _ids(self, pairs: Sequence[Pair]) -> tuple[Tensor, Tensor]:
        sources, targets = zip(*pairs, strict=True)
        return self.source.sources(sources), self.target.targets(targets)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Evaluation mode, without gradients."""
        mode = self.model.training
        self.model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.model.train(mode)


def _check_pairs(call: str, pairs: Sequence[Pair]) -> None:
    """Raise unless there are pairs, and each is two texts."""
    if not isinstance(pairs, Sequence):  # read twice and more: an iterator would be empty the second time
        raise ModelError(f"{call}(pairs) got {type(pairs).__name__}: expected a list of (source, target).")
    if not pairs:
        raise ModelError(f"{call}(pairs): there are none. read_pairs(file) reads them from a file of two columns.")
    for n, pair in enumerate(pairs):
        two = isinstance(pair, (tuple, list)) and len(pair) == 2 and all(isinstance(text, str) for text in pair)
        if not two or not all(words_of(text) for text in pair):
            raise ModelError(
                f"{call}(pairs): pair {n} is {pair!r:.80}; expected (source, target), two texts with words."
            )
