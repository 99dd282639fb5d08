"""The attention matrix as a lazy operator: two primitives (shape and tile), and everything that follows from them."""

from clearhead.maps.base import AttentionMap, Statistics
from clearhead.maps.composed import HeadAverage, average_heads
from clearhead.maps.dense import DenseMap
from clearhead.maps.softmax import SoftmaxMap

__all__ = ["AttentionMap", "DenseMap", "HeadAverage", "SoftmaxMap", "Statistics", "average_heads"]
