"""The table that an atlas is, and its file.

mean[m, l, h] = Σ_t x[m, l, h, t] / n    over all tokens t of a corpus
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from clearhead._files import write_whole
from clearhead._tables import frame
from clearhead._version import __version__
from clearhead.errors import RecordingError
from clearhead.heads.tally import MEASURES, Tally, added

__all__ = ["FORMAT", "Atlas"]

FORMAT = 1  # of saved tables, and of progress
_TALLIES = ("layers", "uniform")


@dataclass(frozen=True)
class Atlas:
    """What every head does over a corpus. Two are equal where every bit is.

    Measures are "entropy" (nats), "distance" (tokens), and shares of attention: "first" (the window's first key),
    "self", "previous" (of queries that have a token before them) and "peak" (the largest weight). A query that may
    attend to nothing is left out. `uniform`: of a head that spreads evenly over what a layer's heads may see.
    """

    model: str
    weights: str  # a digest: two tables are of one model where it is the same
    window: int
    overlap: int
    windows: int
    tokens: int
    layers: tuple[Tally, ...]
    uniform: tuple[Tally, ...]  # of one head, or of as many as there are where they see different keys

    def count(self, measure: str) -> Tensor:
        """How many queries were counted, (L, H) int64."""
        return self._table(measure, "count").long()

    def mean(self, measure: str) -> Tensor:
        """(L, H) float64."""
        return self._table(measure, "mean")

    def baseline(self, measure: str) -> Tensor:
        """The mean of a head that spreads evenly over the keys it may see, (L, H) float64."""
        even = self._table(measure, "mean", self.uniform)
        return even.expand_as(self.mean(measure))

    def least(self, measure: str) -> Tensor:
        """The smallest number of any query, (L, H) float64; infinity where none was counted."""
        return self._table(measure, "least")

    def most(self, measure: str) -> Tensor:
        """The largest number of any query, (L, H) float64; minus infinity where none was counted."""
        return self._table(measure, "most")

    def histogram(self, measure: str) -> Tensor:
        """How many queries are in each bin of `edges(measure)`, (L, H, 256) int64."""
        return self._table(measure, "histogram").long()

    def edges(self, measure: str) -> Tensor:
        """The ends of the histogram's bins, (257,) float64: even in entropy and shares, in ln(1 + distance)."""
        return MEASURES[_known(measure)].edges(self.window)

    def _table(self, measure: str, what: str, tallies: Sequence[Tally] | None = None) -> Tensor:
        at = list(MEASURES).index(_known(measure))
        rows = [torch.as_tensor(getattr(tally, what)[at]) for tally in tallies or self.layers]
        return pad_sequence(rows, batch_first=True, padding_value=0 if what in ("count", "histogram") else math.nan)

    def rows(self) -> list[dict[str, Any]]:
        """A mapping a head: layer, head, tokens; of each measure the mean, `…_min`, `…_max`, and `uniform_…`."""
        columns: dict[str, Tensor] = {}
        for name in MEASURES:
            columns |= {name: self.mean(name), f"{name}_min": self.least(name), f"{name}_max": self.most(name)}
            columns[f"uniform_{name}"] = self.baseline(name)
        count = self.count("self")
        sizes = [(layer, head) for layer, tally in enumerate(self.layers) for head in range(tally.count.shape[1])]
        return [
            {"layer": layer, "head": head, "tokens": int(count[layer, head])}
            | {name: float(column[layer, head]) for name, column in columns.items()}
            for layer, head in sizes
        ]

    def to_pandas(self) -> Any:
        """The rows as a pandas.DataFrame. Raises ImportError where there is no pandas."""
        return frame(self.rows())

    def __add__(self, other: Atlas) -> Atlas:
        """The atlas of both corpora together. Raises RecordingError where model, window or overlap differ."""
        same = ("weights", "window", "overlap")
        if not isinstance(other, Atlas) or any(getattr(self, name) != getattr(other, name) for name in same):
            raise RecordingError(
                f"{self!r} + {other!r}: expected atlases of one model, with the same windows and overlap."
            )
        sums = self.windows + other.windows, self.tokens + other.tokens
        tallies = added(self.layers, other.layers), added(self.uniform, other.uniform)
        return Atlas(self.model, self.weights, self.window, self.overlap, *sums, *tallies)

    def save(self, path: str | Path) -> None:
        """Write it as JSON, whole or not at all; nothing is rounded. Raises OSError."""
        told = {"format": FORMAT, "clearhead": __version__, "measures": list(MEASURES)}
        told |= vars(self) | {name: [tally.as_dict() for tally in getattr(self, name)] for name in _TALLIES}
        write_whole(Path(path), json.dumps(told, allow_nan=False, separators=(",", ":")))

    @classmethod
    def load(cls, path: str | Path) -> Atlas:
        """The atlas in a file that `save` wrote, to the bit. Raises RecordingError where it is none; OSError."""
        try:
            told = json.loads(Path(path).read_text("ascii"))
            if (told.pop("format"), told.pop("measures")) != (FORMAT, list(MEASURES)):
                raise RecordingError(
                    f"{path} is an atlas of another format: make it anew, or read it with the clearhead that did."
                )
            del told["clearhead"]
            return cls(**told | {name: tuple(map(Tally.from_dict, told[name])) for name in _TALLIES})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RecordingError(f"{path} is no atlas, or damaged: {error}.") from error

    def __repr__(self) -> str:
        heads = sum(tally.count.shape[1] for tally in self.layers)
        return (
            f"Atlas({self.model}: {heads} heads, {self.tokens:,} tokens in {self.windows:,} windows of {self.window:,},"
            f" overlap {self.overlap:,})"
        )


def _known(measure: str) -> str:
    if measure not in MEASURES:
        raise ValueError(f"{measure!r} is no measure of an atlas; expected one of {', '.join(MEASURES)}.")
    return measure
