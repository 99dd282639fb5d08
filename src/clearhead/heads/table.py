"""Every head in a table: its role, its scores, and those of a uniform head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, overload

if TYPE_CHECKING:
    from pandas import DataFrame

__all__ = ["CROSS", "ROLES", "Head", "HeadTable", "role_of"]

ROLES = ("sink", "previous", "induction", "duplicate", "self", "local", "broad", "other")
CROSS = ("sink", "aligned", "broad", "other")  # of heads whose keys are another text
SPECIFIC = ("previous", "induction", "duplicate", "self", "local", "aligned")


@dataclass(frozen=True)
class Head:
    """One head: its role, its scores and those of a uniform head on the same mask.

    Scores are mean shares of attention in [0, 1], over the queries that may see three keys or more: first and sink (of
    queries that are no sinks themselves), previous, self, local (2 to 8 tokens away), duplicate (other copies of the
    token), induction (the token after one), the last five over queries that have such keys and no sink among them;
    broad is the entropy over its maximum. Of cross-attention, over all queries: sink (keys that collect three times
    their share), aligned (keys as far through their text as the query is through its own), broad. In an image local
    means patches one or two away, and scores that ask for the order of tokens are left out. None where no query counts.
    Entropy in nats, distance in tokens; None between two texts. probe: its scores on repeated random tokens, if it was
    shown any.
    """

    layer: int
    head: int
    role: str
    scores: Mapping[str, float | None]
    baselines: Mapping[str, float | None]
    entropy: float
    distance: float | None
    probe: Mapping[str, float | None] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """L17H5, zero-based."""
        return f"L{self.layer}H{self.head}"

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


class HeadTable(Sequence[Head]):
    """All heads of a view, layer by layer."""

    def __init__(self, heads: Sequence[Head]) -> None:
        self._heads = tuple(heads)

    @overload
    def __getitem__(self, index: int) -> Head: ...
    @overload
    def __getitem__(self, index: slice) -> HeadTable: ...
    def __getitem__(self, index: int | slice) -> Head | HeadTable:
        return HeadTable(self._heads[index]) if isinstance(index, slice) else self._heads[index]

    def __len__(self) -> int:
        return len(self._heads)

    def counts(self) -> dict[str, int]:
        """How many heads have each role; "aligned" where there are heads of cross-attention."""
        roles = (*ROLES, "aligned") if any("aligned" in head.scores for head in self) else ROLES
        return {role: sum(head.role == role for head in self) for role in roles}

    def strongest(self, role: str, n: int = 5) -> list[Head]:
        """The heads of a role, strongest first."""
        if role not in (*ROLES, *CROSS):
            raise ValueError(f"strongest({role!r}): the roles are {', '.join(dict.fromkeys((*ROLES, *CROSS)))}.")
        return sorted((head for head in self if head.role == role), key=lambda head: -head.strength)[:n]

    def to_pandas(self) -> DataFrame:
        """A row a head: layer, head, role, each score, that of a uniform head, and those on repeated random tokens.

        Raises ImportError without pandas.
        """
        try:
            import pandas
        except ImportError as error:
            raise ImportError("heads.to_pandas() needs pandas. Run: pip install pandas") from error
        return pandas.DataFrame([_row(head) for head in self])

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
        **head.scores,
        **{f"uniform_{name}": value for name, value in head.baselines.items()},
        "entropy": head.entropy,
        "distance": head.distance,
        **{f"probe_{name}": value for name, value in head.probe.items()},
    }


def role_of(scores: Mapping[str, float | None], baselines: Mapping[str, float | None]) -> str:
    """The role that a head's scores, beside a uniform head's, add up to.

    Of previous, induction, duplicate, self, local and aligned with a score ≥ .25 and ≥ 1.25 times the baseline, the
    one furthest above its baseline; else sink if ≥ .7; broad if the entropy is ≥ .6 of its maximum; sink if ≥ .5;
    other. Without the baseline nearly every head is "local" on a text of ten tokens, where most keys are near.

    >>> role_of({"previous": 0.4, "sink": 0.5}, {"previous": 0.1}), role_of({"local": 0.6, "sink": 0.8}, {"local": 0.6})
    ('previous', 'sink')
    """
    value, base = ({name: table.get(name) or 0.0 for name in (*ROLES, *CROSS)} for table in (scores, baselines))
    found = [name for name in SPECIFIC if value[name] >= max(0.25, 1.25 * base[name])]
    if found:
        return max(found, key=lambda name: value[name] - base[name])
    if value["sink"] >= 0.7:
        return "sink"
    if value["broad"] >= 0.6:
        return "broad"
    return "sink" if value["sink"] >= 0.5 else "other"
