"""clearhead: attention you can read. The attention matrix is an operator, not an array."""

from clearhead.errors import DTypeError, ModelError, RecordingError, ShapeError
