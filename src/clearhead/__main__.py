"""The ``clearhead`` command, also as ``python -m clearhead``."""

from __future__ import annotations

import signal
import sys
from types import FrameType

_EXTRAS = {"typer": "models", "rich": "models", "platformdirs": "models", "jupytext": "learn"}


def main() -> None:
    """Run the command line; exit code 2 with a message on bad input, 130 on Ctrl-C, 143 on SIGTERM."""
    signal.signal(signal.SIGTERM, _terminate)
    signal.signal(signal.SIGINT, _interrupt)
    try:
        from clearhead.cli import app

        app()
    except ModuleNotFoundError as error:  # here or in a command: each imports only what it uses
        missing = (error.name or "").partition(".")[0]
        if missing not in _EXTRAS:
            raise
        print(
            f'The clearhead command needs {missing}. Run: pip install "clearhead[{_EXTRAS[missing]}]"', file=sys.stderr
        )
        sys.exit(2)
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        sys.exit(130)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    """The first Ctrl-C ends the command; a second one must not cut short its cleaning up, or its exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def _terminate(signum: int, frame: FrameType | None) -> None:
    """Leave by an exception, so that half-written files are removed on the way out."""
    sys.exit(128 + signum)


if __name__ == "__main__":
    main()
