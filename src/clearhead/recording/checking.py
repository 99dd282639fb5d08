"""Trust, but verify: an attention function that clearhead does not know is checked on one query of each call.

weights[t] @ v must be the output that the function returned for query t (`comparing.py`). Not checked: a call
with dropout, whose output is random.
"""

from __future__ import annotations

from torch import Tensor

from clearhead.errors import RecordingError
from clearhead.recording.calls import Call
from clearhead.recording.comparing import gives_output
from clearhead.recording.interfaces import Arguments

__all__ = ["confirmed"]


def confirmed(calls: list[Call], output: Tensor, arguments: Arguments) -> Call:
    """The first reading of the call that reproduces its output (B, T, H, Dv); RecordingError where none does.

    Dropout makes the output random, so then the first reading is taken at its word.
    """
    if arguments.dropout > 0 or output.numel() == 0:
        return calls[0]
    for call in calls:
        if gives_output(call.detached(), output.detach()):
            return call
    raise RecordingError(
        f"{arguments.arrived()}, and its output is not softmax(scale · q·k + mask) @ v: this implementation"
        f" ({_implementation(arguments)!r}) does something that clearhead does not know."
        " Use attn_implementation='sdpa', or report the model."
    )


def _implementation(arguments: Arguments) -> object:
    return getattr(getattr(arguments.module, "config", None), "_attn_implementation", "unknown")
