"""The lessons' exercises: what to write, the checks of it, and how far the learner is."""

from clearhead.learn.exercise import Exercise, Wrong, require_tensor, unchanged

__all__ = ["Exercise", "Wrong", "require_tensor", "unchanged"]
