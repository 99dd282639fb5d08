"""Recording: the attention of any PyTorch model, as it was computed, without changing what is computed."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from clearhead.recording.recorder import Keep, Recorder
from clearhead.recording.recording import Group, Pass, Recording, Text

__all__ = ["Group", "Pass", "Recorder", "Recording", "Text", "record"]


def record(
    model: nn.Module,
    *,
    layers: Iterable[int] | None = None,
    keep: Keep | None = None,
    padding: Tensor | bool | None = None,
    detach: bool = True,
) -> Recorder:
    """Record every attention call of `model` inside a `with` block; its output stays bit for bit the same.

    Seen are transformers models through their attention interface, whatever the implementation; PyTorch's own
    `nn.MultiheadAttention` and `nn.Transformer` family, their fast path left on; every other program that calls
    `torch.nn.functional.scaled_dot_product_attention`, or `flex_attention` without compiling it; and attention
    written by hand, a softmax over the last of at least three dimensions whose result multiplies the values,
    `softmax(scores) @ v` (in two dimensions only self-attention, `softmax(q @ k.T) @ v`). Weights are those before
    dropout. Calls of this model in the entering thread are recorded, no others. Nothing is left behind, after an
    exception too. Blocks may be nested and overlap.

    Several calls of the model in one block are several passes. Calls that go on from one another, as `generate` makes
    them, are one text, and `recording[17]` is then one map over prompt and generated tokens, equal to that of one call
    over the same tokens; the newest token never was a query. Of such calls q and k are kept, and no v. Beam search,
    assisted decoding and a cache that rounds keys make no one text: `recording.passes` holds their calls, and a call
    of the model on the text that came out gives its maps.

    A compiled model runs uncompiled in the block, and a warning says so: torch.compile then is off for the whole
    process, other models and threads included. A compiled function inside a plain model is split at its
    attention calls (one compiled with fullgraph=True fails). An `nn.MultiheadAttention` in it then may take the fast
    path, which PyTorch's compiler does not take: there the output is the same up to float rounding.

    Args:
        model: the module that is called in the block; each call of it is one pass.
        layers: numbers of the layers to keep (the order of the attention calls in a pass, from 0); None keeps
            all. A module that is called several times in a pass is a layer at each call.
        keep: a function of a layer's label ("L17") and its map, called as each map is made; what it returns is in
            `recording.results` by label, and neither the map nor q, k and v are kept.
        padding: (B, tokens), True or 1 where a token is real; None reads it from the call's own 2-D
            `attention_mask`, or the padding masks of PyTorch's own modules; False takes all tokens for real. Padded
            queries attend to nothing, padded keys get weight 0. What is generated after the stated tokens is real.
            Queries that a model pools from tokens (Funnel) are all taken for real.
        detach: False keeps the autograd graph, so that a loss on the maps trains the model. (There is none under
            no_grad, nor with reentrant gradient checkpointing, which computes it later.)

    Returns:
        A context manager; entering it gives the `Recording`, a sequence of maps, complete when the model has
        returned: `SoftmaxMap`, or `DenseMap` of the weights where attention written by hand is more than a softmax of
        scaled q·k, masks and biases. `.encoder`, `.decoder` and `.cross` are the maps of each side of an
        encoder-decoder model.

    Raises:
        RecordingError: for a model that is scripted, exported or quantised (torch.ao's MultiheadAttention), or no
            module; for a recorder that is entered again; on leaving, if no attention call was seen, or a layer of
            `layers` does not exist; while the model runs, if a call computes something that is not understood, or
            `keep` fails; on reading, where calls make no one text.

    Cost: O(1) a call beside holding q, k and v: no weights are computed. (An eager implementation, whose code
    differs from model to model, and one written by hand are checked on one query a call; the masks of the latter are
    compared with the causal one. PyTorch's fast paths give out no q, k and v, which are
    projected once more.) A step of generation holds its query, and compares the keys of earlier tokens with
    those it knows: O(S·D) a key head.

    >>> import torch
    >>> from torch.nn import functional as F
    >>> class Layer(torch.nn.Module):
    ...     def forward(self, x):
    ...         return F.scaled_dot_product_attention(x, x, x, is_causal=True)
    >>> layer = Layer()
    >>> with record(layer) as recording:
    ...     out = layer(torch.randn(1, 2, 5, 4))
    >>> recording[0].shape, recording[0][0, 1, 0].tolist()
    ((1, 2, 5, 5), [1.0, 0.0, 0.0, 0.0, 0.0])
    """
    return Recorder(model, layers=layers, keep=keep, padding=padding, detach=detach)
