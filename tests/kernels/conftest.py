"""What tests of the kernels ask for."""

from __future__ import annotations

import pytest

from clearhead.kernels import gradients


@pytest.fixture
def recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    """However small a map is, its tiles are computed again."""
    monkeypatch.setattr(gradients, "FEW", -1)
