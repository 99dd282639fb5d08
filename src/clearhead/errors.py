"""What clearhead raises: five kinds, each also the Python kind that a caller would expect.

ValueError   └── ShapeError       sizes that do not fit together, or a layout that would have to be guessed
TypeError    └── DTypeError       a dtype or kind of object that the operation does not take
RuntimeError ├── RecordingError   attention that was not, or cannot be, seen
             ├── ModelError       a model or a text that cannot be loaded or used
             └── LessonError      a lesson, or the learner's file, that is not there
"""

from __future__ import annotations

__all__ = ["DTypeError", "LessonError", "ModelError", "RecordingError", "ShapeError"]


class ShapeError(ValueError):
    """Sizes that do not fit together; the message restates the call and says what was expected."""


class DTypeError(TypeError):
    """A dtype, or a kind of object, that the operation does not take."""


class RecordingError(RuntimeError):
    """Attention was not seen, or cannot be; the message lists the likely causes."""


class ModelError(RuntimeError):
    """A model or a text cannot be loaded or used; the message says what to do."""


class LessonError(RuntimeError):
    """A lesson, or the learner's file, that is not there; the message says what to do."""


for _error in (ShapeError, DTypeError, RecordingError, ModelError, LessonError):
    _error.__module__ = "clearhead"
