"""The page: one self-contained file on which a person sees what every head attends to.

A page is made in three steps, and its size is known after the second:

    strong = Strong()                    # a reducer: takes the tiles of one layer, keeps the strong weights
    payload = build(layers, tokens, …)   # encodes what the page needs, within a budget of bytes
    text = render(payload)               # the file: `payload.nbytes` bytes of UTF-8, needs nothing else

The page itself is plain ES modules in `static/`; they work served as they are, or joined into the one file.
"""

from clearhead.page.html import render
from clearhead.page.payload import BudgetError, LayerData, Payload, build, thumbnails
from clearhead.page.strong import Strong, StrongWeights

__all__ = [
    "BudgetError",
    "LayerData",
    "Payload",
    "Strong",
    "StrongWeights",
    "build",
    "render",
    "thumbnails",
]
