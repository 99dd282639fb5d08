"""The ``clearhead`` command, also as ``python -m clearhead``."""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer

_EXTRAS = ("typer", "rich", "platformdirs")


def main() -> None:
    """Run the command line; exit code 2 with a message on bad input, 130 on Ctrl-C, 143 on SIGTERM."""
    signal.signal(signal.SIGTERM, _terminate)
    try:
        _app()()
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        sys.exit(130)


def _app() -> typer.Typer:
    try:
        from clearhead.cli import app
    except ModuleNotFoundError as error:
        if error.name not in _EXTRAS:
            raise
        print(f'The clearhead command needs {error.name}. Run: pip install "clearhead[models]"', file=sys.stderr)
        sys.exit(2)
    return app


def _terminate(signum: int, frame: FrameType | None) -> None:
    """Leave by an exception, so that half-written files are removed on the way out."""
    sys.exit(128 + signum)


if __name__ == "__main__":
    main()
