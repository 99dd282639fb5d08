"""The file: the page and its data in one document that needs nothing else."""

from __future__ import annotations

import html

from clearhead.page.payload import Payload
from clearhead.page.shell import DATA, shell

__all__ = ["framed", "render"]


def render(payload: Payload) -> str:
    """One self-contained HTML document: works from a file, offline, and forbids itself any request.

    Returns: text of exactly `payload.nbytes` bytes in UTF-8.
    """
    return shell().replace(DATA, "".join(payload.elements))


def framed(payload: Payload, name: str) -> str:
    """The document in a frame, for a notebook: its own page is out of reach."""
    page = html.escape(render(payload), quote=True)
    return (
        f'<iframe title="clearhead: {html.escape(name, quote=True)}" srcdoc="{page}"'
        ' style="width:100%;height:640px;border:0" sandbox="allow-scripts allow-downloads"></iframe>'
    )
