"""Every head in a table: its role, its scores, and those of a uniform head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, overload

from clearhead._tables import Labelled, Rows, frame
from clearhead.heads.judging import CROSS, ROLES

__all__ = ["Head", "HeadTable"]


@dataclass(frozen=True)
class Head(Labelled):
    """One head: its role, its scores and those of a uniform head on the same mask.

    Scores are mean shares of attention in [0, 1], over the queries that may see three keys or more: first and sink (of
    queries that are no sinks themselves), previous, self, local (2 to 8 tokens away), duplicate (other copies of the
    token), induction (the token after one), the last five over queries that have such keys and no sink among them;
    broad is the entropy over its maximum. Of cross-attention, over all queries: sink (keys that collect three times
    their share), aligned (keys as far through their text as the query is through its own), broad. In an image local
    means patches one or two away, and scores that ask for the order of tokens are left out. None where no query counts.
    Entropy in nats, distance in tokens; None between two texts.

    detail: what the role is more exactly, as "offset -3", "delimiter", or a relation that was given. confidence: how
    clear it is, 0 to 1. details: the scores behind the detail. probe: the scores on repeated random tokens, if any.
    """

    role: str
    scores: Mapping[str, float | None]
    baselines: Mapping[str, float | None]
    entropy: float
    distance: float | None
    detail: str = ""
    confidence: float = 0.0
    details: Mapping[str, float | None] = field(default_factory=dict)
    probe: Mapping[str, float | None] = field(default_factory=dict)

    @property
    def strength(self) -> float:
        """The score of the head's role; 0 for "other"."""
        return self.scores.get(self.role) or 0.0

    @property
    def summary(self) -> str:
        """Its label, the score of its role and that of a uniform head: ``L17H5 0.51 / 0.02``.

        The score alone for "broad", since a uniform head has all the entropy there is; "other" has none.
        """
        score, baseline = self.scores.get(self.role), self.baselines.get(self.role)
        if score is None or baseline is None:
            return self.label
        return f"{self.label} {score:.2f}" + ("" if self.role == "broad" else f" / {baseline:.2f}")


class HeadTable(Rows[Head]):
    """All heads of a view, layer by layer."""

    @overload
    def __getitem__(self, index: int) -> Head: ...
    @overload
    def __getitem__(self, index: slice) -> HeadTable: ...
    def __getitem__(self, index: int | slice) -> Head | HeadTable:
        return HeadTable(self._heads[index]) if isinstance(index, slice) else self._heads[index]

    def counts(self) -> dict[str, int]:
        """How many heads have each role; "aligned" where there are heads of cross-attention."""
        roles = (*ROLES, "aligned") if any("aligned" in head.scores for head in self) else ROLES
        return {role: sum(head.role == role for head in self) for role in roles}

    def strongest(self, role: str, n: int = 5) -> list[Head]:
        """The heads of a role, strongest first."""
        if role not in (*ROLES, *CROSS):
            raise ValueError(f"strongest({role!r}): the roles are {', '.join(dict.fromkeys((*ROLES, *CROSS)))}.")
        return sorted((head for head in self if head.role == role), key=lambda head: -head.strength)[:n]

    def to_pandas(self) -> Any:
        """A row a head: layer, head, role, each score, that of a uniform head, and those on repeated random tokens.

        Raises ImportError without pandas.
        """
        return frame(_row(head) for head in self)

    def plot(self) -> Any:
        """A matplotlib figure: a cell a head, layer by layer, in the colour of its role. Raises ImportError."""
        from clearhead.heads.drawing import roles  # matplotlib is an extra, imported where used

        return roles(self)

    def __repr__(self) -> str:
        counts = ", ".join(f"{n} {role}" for role, n in self.counts().items() if n)
        return f"HeadTable({len(self)} heads: {counts})"


def _row(head: Head) -> dict[str, Any]:
    return {
        "layer": head.layer,
        "head": head.head,
        "role": head.role,
        "detail": head.detail,
        "confidence": head.confidence,
        **head.scores,
        **head.details,
        **{f"uniform_{name}": value for name, value in head.baselines.items()},
        "entropy": head.entropy,
        "distance": head.distance,
        **{f"probe_{name}": value for name, value in head.probe.items()},
    }
