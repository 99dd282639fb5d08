"""Several views on one page: texts, models, items of a batch, steps of a training run; one control chooses."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import overload

from clearhead._files import write_whole
from clearhead._format import size
from clearhead.errors import ShapeError
from clearhead.page.answers import Answers
from clearhead.page.html import render
from clearhead.page.notebook import cell
from clearhead.page.payload import Payload, default_budget, together
from clearhead.view import View

__all__ = ["Views"]


class Views(Sequence[View]):
    """Views that one page shows, one at a time: the same head, query and key, as far as there are such in each.

    Attributes: labels: what each is called. Numbers, such as the steps of a training run, make the control a slider;
    words make it a list.
    """

    def __init__(self, views: Sequence[View], labels: Sequence[str | int] | None = None) -> None:
        self._views = list(views)
        if not self._views:
            raise ShapeError("Views([]): expected at least one view.")
        told: list[str | int] = [view.title for view in self._views]
        told = told if labels is None else list(labels)
        if len(told) != len(self._views):
            raise ShapeError(f"Views(…, labels=…): {len(self._views)} views, but {len(told)} labels.")
        self.labels = told
        self._asked: list[Answers] = []

    def __len__(self) -> int:
        return len(self._views)

    @overload
    def __getitem__(self, index: int) -> View: ...
    @overload
    def __getitem__(self, index: slice) -> Views: ...
    def __getitem__(self, index: int | slice) -> View | Views:
        if isinstance(index, slice):
            return Views(self._views[index], self.labels[index])
        return self._views[index]

    def __iter__(self) -> Iterator[View]:
        return iter(self._views)

    def page(self, *, budget: int | None = None) -> Payload:
        """The data of one page on all of them, encoded to fit `budget` bytes; each gets an equal part.

        By default what the views would get one by one, at most 25 MB.
        """
        pages = [partial(_page_of, view) for view in self._views]
        most = min(25_000_000, sum(default_budget(max(map(len, view.texts))) for view in self._views))
        return together(pages, self.labels, most if budget is None else budget)

    def save(self, path: str | os.PathLike[str], *, budget: int | None = None) -> Path:
        """Write the page as one HTML file that needs no network; the file appears whole or not at all."""
        target = Path(path).expanduser()
        write_whole(target, render(self.page(budget=budget)))
        return target

    def answers(self) -> list[Answers]:
        """What a live page asks for, of each view: see `View.answers`."""
        every = [view.answers() for view in self._views]
        for n, answers in enumerate(every):
            answers.stand_beside(every, n, self.labels)
        return every

    def _repr_html_(self) -> str:
        self._asked = self._asked or self.answers()  # by pages that are live as long as these views are there
        return cell(render(self.page()), self._views[0].name, self._asked[0], [repr(self)])

    def __repr__(self) -> str:
        held = size(sum(view.nbytes for view in self._views))
        return f"Views({len(self)}: {', '.join(map(str, self.labels[:3]))}{', …' * (len(self) > 3)}; holds {held})"


def _page_of(view: View, budget: int) -> Payload:
    return view.page(budget=budget)
