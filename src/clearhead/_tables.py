"""Tables with a row a head, and for pandas, which is imported only where somebody asks for one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar, overload

__all__ = ["Labelled", "Rows", "frame"]


@dataclass(frozen=True)
class Labelled:
    """Something known of one head."""

    layer: int
    head: int

    @property
    def label(self) -> str:
        """L17H5, zero-based."""
        return f"L{self.layer}H{self.head}"


Row = TypeVar("Row", bound=Labelled)


class Rows(Sequence[Row]):
    """A row a head, layer by layer."""

    def __init__(self, heads: Iterable[Row]) -> None:
        self._heads = tuple(heads)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | Sequence[Row]:
        return self._heads[index]

    def __len__(self) -> int:
        return len(self._heads)

    def to_pandas(self) -> Any:
        """A DataFrame with a row a head."""
        return frame(asdict(head) for head in self)


def frame(rows: Iterable[Mapping[str, Any]]) -> Any:
    """A pandas DataFrame of these rows; ImportError that says what to install, where there is no pandas."""
    try:
        import pandas
    except ImportError as error:
        raise ImportError("to_pandas() needs pandas. Run: pip install pandas") from error
    return pandas.DataFrame(list(rows))
