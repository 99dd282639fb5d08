"""Mask rules: which key a query may attend to, as a rule and never as a T×S tensor.

True means "may attend", everywhere (the polarity of PyTorch's scaled_dot_product_attention). A rule knows, for a
block of queries and keys, whether the block is empty, full or mixed, so that work is skipped where nothing is
visible and no mask is read where everything is. Rules combine with ``&``, ``|`` and ``~`` and draw themselves:

>>> print((causal() & sliding_window(2)).draw(4, 4))
■ ⬚ ⬚ ⬚
■ ■ ⬚ ⬚
⬚ ■ ■ ⬚
⬚ ⬚ ■ ■
>>> print(causal().draw(2, 5))  # T ≠ S is lower-right: the last query is the newest token
■ ■ ■ ■ ⬚
■ ■ ■ ■ ■

A query that no key is visible to (an all-⬚ row) gets weights 0, output 0, lse −inf and entropy 0, everywhere.
"""

from __future__ import annotations

from clearhead.masks.positions import FOREVER as FOREVER
from clearhead.masks.positions import Band as Band
from clearhead.masks.positions import (
    causal,
    causal_upper_left,
    first_tokens,
    prefix,
    sliding_window,
    symmetric_window,
)
from clearhead.masks.rule import Both as Both
from clearhead.masks.rule import BoundMask, Coverage, MaskRule, as_rule, dense
from clearhead.masks.rule import all_of as all_of
from clearhead.masks.rule import block_indices as block_indices
from clearhead.masks.sequences import documents, padding
from clearhead.masks.sparse import block_sparse, global_tokens, strided

__all__ = [
    "BoundMask",
    "Coverage",
    "MaskRule",
    "as_rule",
    "block_sparse",
    "causal",
    "causal_upper_left",
    "dense",
    "documents",
    "first_tokens",
    "global_tokens",
    "padding",
    "prefix",
    "sliding_window",
    "strided",
    "symmetric_window",
]
