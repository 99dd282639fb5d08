"""The small models of the tests of recording, with which heads are knocked out; and a stand-in for pandas."""

import sys
from types import SimpleNamespace

import pytest

from ..recording.conftest import ids, make_nano, nano, touched

__all__ = ["ids", "make_nano", "nano", "pandas_rows", "touched"]


@pytest.fixture
def pandas_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A `DataFrame` is the list of its rows: pandas is not needed to see what it would be given."""
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=list))
