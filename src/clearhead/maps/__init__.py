"""The attention matrix as a lazy operator: two primitives (shape and tile), and everything that follows from them."""

from clearhead.maps.across import Rollout, ValueWeighted, rollout, value_weighted
from clearhead.maps.additive import AdditiveMap
from clearhead.maps.base import AttentionMap, Statistics
from clearhead.maps.composed import HeadAverage, Stitched, average_heads
from clearhead.maps.dense import DenseMap
from clearhead.maps.linear import LinearMap
from clearhead.maps.softmax import SoftmaxMap

__all__ = [
    "AdditiveMap",
    "AttentionMap",
    "DenseMap",
    "HeadAverage",
    "LinearMap",
    "Rollout",
    "SoftmaxMap",
    "Statistics",
    "Stitched",
    "ValueWeighted",
    "average_heads",
    "rollout",
    "value_weighted",
]
