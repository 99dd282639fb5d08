"""The file: the page and its data in one document that needs nothing else."""

from __future__ import annotations

from clearhead.page.payload import Payload
from clearhead.page.shell import DATA, shell

__all__ = ["render"]


def render(payload: Payload) -> str:
    """One self-contained HTML document: works from a file, offline, and forbids itself any request.

    Returns: text of exactly `payload.nbytes` bytes in UTF-8.
    """
    return shell().replace(DATA, "".join(payload.elements))
