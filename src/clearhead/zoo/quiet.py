"""Transformers' bars, logs and warnings, held back for the length of a block."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers inside the block; its settings are as before afterwards, whatever happens."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers.utils import logging  # in a notebook, importing it warns of a widget that it does not need

        bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
        logging.disable_progress_bar()
        logging.set_verbosity_error()
        try:
            yield
        finally:
            logging.set_verbosity(level)
            if bars:
                logging.enable_progress_bar()


@contextlib.contextmanager
def no_stderr() -> Iterator[None]:
    """Drop what is written to stderr inside the block: the one bar (the GGUF reader's) without a switch."""
    with contextlib.redirect_stderr(io.StringIO()):
        yield
