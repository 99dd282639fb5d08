"""clearhead: attention you can read. The attention matrix is an operator, not an array.

Names are resolved on first use, so that importing clearhead costs no more than it must.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from clearhead._version import __version__

if TYPE_CHECKING:
    from clearhead import cost, functional, learn, masks, nn, plots, reference, scores, zoo
    from clearhead.errors import DTypeError, LessonError, ModelError, RecordingError, ShapeError
    from clearhead.functional import scaled_dot_product_attention
    from clearhead.heads import compare, knockout
    from clearhead.looking import look
    from clearhead.maps import AdditiveMap, AttentionMap, DenseMap, LinearMap, SoftmaxMap, Statistics, average_heads
    from clearhead.recording import Recording, record
    from clearhead.view import View
    from clearhead.views import Views

# `heads`, `models` and `testing` are modules too, and not among the public names, of which there are thirty at most.
_MODULES = (
    *("cost", "functional", "heads", "learn", "masks", "models", "nn", "plots", "reference", "scores", "testing"),
    "zoo",
)
_HOMES = {
    "AdditiveMap": "maps",
    "AttentionMap": "maps",
    "DTypeError": "errors",
    "DenseMap": "maps",
    "LessonError": "errors",
    "LinearMap": "maps",
    "ModelError": "errors",
    "Recording": "recording",
    "RecordingError": "errors",
    "ShapeError": "errors",
    "SoftmaxMap": "maps",
    "Statistics": "maps",
    "View": "view",
    "Views": "views",
    "average_heads": "maps",
    "compare": "heads",
    "knockout": "heads",
    "look": "looking",
    "record": "recording",
    "scaled_dot_product_attention": "functional",
}

__all__ = [
    "AdditiveMap",
    "AttentionMap",
    "DTypeError",
    "DenseMap",
    "LessonError",
    "LinearMap",
    "ModelError",
    "Recording",
    "RecordingError",
    "ShapeError",
    "SoftmaxMap",
    "Statistics",
    "View",
    "Views",
    "__version__",
    "average_heads",
    "compare",
    "cost",
    "functional",
    "knockout",
    "learn",
    "look",
    "masks",
    "nn",
    "plots",
    "record",
    "reference",
    "scaled_dot_product_attention",
    "scores",
    "zoo",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"clearhead.{name}")
    if name in _HOMES:
        found = getattr(importlib.import_module(f"clearhead.{_HOMES[name]}"), name)
        globals()[name] = found
        return found
    raise AttributeError(f"module 'clearhead' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
