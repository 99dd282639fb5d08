"""The small models of the tests of recording, with which heads are knocked out."""

from ..recording.conftest import ids, make_nano, nano, touched

__all__ = ["ids", "make_nano", "nano", "touched"]
