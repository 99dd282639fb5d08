"""Ways of generating in which the calls of a model make no one text, told by the function that calls the model.

The keys show most of it, but not all: beams that happen to stay in their order, and the last tokens that assisted
decoding tries and does not accept, look like a text that grows.
"""

from __future__ import annotations

import sys
from types import FrameType

__all__ = ["way_of_generating"]

# transformers' functions, by name; some are in repositories of their own.
_WAYS = {
    "_beam_search": "beam search goes on with several texts and reorders them at each step",
    "_group_beam_search": "beam search goes on with several texts and reorders them at each step",
    "_constrained_beam_search": "beam search goes on with several texts and reorders them at each step",
    "_contrastive_search": "contrastive search tries several tokens at each step and takes all but one back",
    "_assisted_decoding": "assisted decoding tries tokens and takes back those that it does not accept",
}


def way_of_generating() -> str | None:
    """What `generate`, which calls the model now, does with its texts; None where it writes each on, or is not there.

    Cost: one look at each frame of the stack, a few microseconds.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        way = _WAYS.get(frame.f_code.co_name)
        if way is not None and str(frame.f_globals.get("__name__")).startswith("transformers"):
            return way
        frame = frame.f_back
    return None
