"""Tables for pandas, which is imported only where somebody asks for one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["frame"]


def frame(rows: Iterable[Mapping[str, Any]]) -> Any:
    """A pandas DataFrame of these rows; ImportError that says what to install, where there is no pandas."""
    try:
        import pandas
    except ImportError as error:
        raise ImportError("to_pandas() needs pandas. Run: pip install pandas") from error
    return pandas.DataFrame(list(rows))
