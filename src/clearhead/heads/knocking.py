"""Evidence that a head matters: what the model does without it, or with its attention made trivial."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from clearhead._checks import describe
from clearhead.errors import ModelError, RecordingError
from clearhead.maps import AttentionMap
from clearhead.recording import huggingface, observer, record, torch_modules
from clearhead.recording.buffers import buffers_of
from clearhead.recording.changing import KINDS, Change, How
from clearhead.recording.models import (
    Places,
    check_model,
    check_parts,
    encoders,
    inside,
    parts_of,
    recomputing,
    running_eagerly,
    unwrapped,
)

__all__ = ["HeadMeans", "Knockout", "head_means", "knockout"]

HeadMeans: TypeAlias = Mapping[int, Tensor]  # by layer, (H, Dv)


def knockout(model: nn.Module, heads: Mapping[tuple[int, int], str], *, means: HeadMeans | None = None) -> Knockout:
    """Change some heads of `model` inside a `with` block, and nothing else of it.

    Layers and heads are numbered as by `record`, from 0. What a head brings to the output projection becomes

    - "zero": 0;
    - "mean": its mean output over a corpus, as `head_means(model, corpus)` gives it;
    - "uniform": the even mean of the values of all keys that it may see;
    - "previous": the value of the token before the query (the query's own where it may not see that one, as the first
      query of a causal head; 0 where neither).

    A recording made inside the block, or around it, holds what was computed: the changed weights, rows of 0 for "zero"
    and "mean", which no weights give. Dropout is not applied to changed heads. Blocks nest; of a head that several
    change, the innermost block's word counts. Calls of this model in the entering thread are changed, no others. A
    compiled model runs uncompiled in the block, as in that of `record`.

    Args:
        model: any module that `record` records.
        heads: what becomes of head (layer, head).
        means: by layer, the mean outputs (H, Dv) of its heads; needed for "mean".

    Raises:
        RecordingError: for what `record` refuses; while the model runs, for a head that does not exist, "previous" of
            cross-attention, gradient checkpointing (which computes layers again after the block), and where the outputs
            of the heads cannot be told apart; on leaving, for a layer that does not exist, and if the model was not
            called.
        ValueError: for another word, or a key that is no (layer, head).

    Cost: that of the model; "uniform" adds one product of attention a head, and an encoder layer on PyTorch's fast path
    runs in several kernels.

    >>> from torch.nn import functional as F
    >>> class Layer(torch.nn.Module):
    ...     def forward(self, x):
    ...         return F.scaled_dot_product_attention(x, x, x, is_causal=True)
    >>> layer, x = Layer(), torch.arange(8.0).view(1, 2, 4, 1)
    >>> with knockout(layer, {(0, 0): "zero", (0, 1): "previous"}):
    ...     layer(x).squeeze()
    tensor([[0., 0., 0., 0.],
            [4., 4., 5., 6.]])
    """
    return Knockout(model, heads, means)


@torch.no_grad()
def head_means(model: nn.Module, corpus: Iterable[Any]) -> dict[int, Tensor]:
    """The mean output of every head over a corpus, before the output projection: for `knockout(…, means=…)`.

    m[h] = mean over queries t of (A_h v_h)[t]; queries that attend to nothing (padding) are left out.

    Args:
        model: any module that `record` records, in eval mode.
        corpus: what the model is called with, one by one: a tensor as model(x), a mapping as model(**x).

    Returns: by layer, (H, Dv) float64.

    Raises: RecordingError where a layer's values are not understood; ModelError where outputs are not finite; TypeError
        for other members of a corpus; ValueError for a corpus without any.

    Cost: a recording, and one product of attention a layer; no weights are held.
    """
    sums: dict[int, tuple[Tensor, Tensor]] = {}
    if isinstance(corpus, (Tensor, Mapping)):
        raise TypeError(f"head_means: the corpus is {describe(corpus)}; expected a list of such, [ids].")

    def keep(name: str, attn: AttentionMap) -> None:
        brought, queries = _sum_of_outputs(name, attn)
        before = sums.get(int(name[1:]), (0, 0))
        sums[int(name[1:])] = before[0] + brought, before[1] + queries

    for one in corpus:
        with record(model, keep=keep):
            _call(model, one)
    if not sums:
        raise ValueError(
            "head_means: the corpus is empty; expected at least one member, which the model is called with."
        )
    return {layer: total / queries.clamp(min=1) for layer, (total, queries) in sums.items()}


def _sum_of_outputs(name: str, attn: AttentionMap) -> tuple[Tensor, Tensor]:
    """Of every head the sum of its outputs (H, Dv), and how many queries attend (H, 1)."""
    v = getattr(attn, "v", None)
    if v is None:
        raise RecordingError(f"head_means: the values of layer {name} are not known, only its weights: {attn!r}.")
    outputs = (attn @ torch.cat([v, torch.ones_like(v[..., :1])], -1)).double()  # (B, H, T, Dv + 1)
    if not bool(torch.isfinite(outputs).all()):
        raise ModelError(f"head_means: what the heads of {name} bring is not finite: look at the model's weights.")
    attends = outputs[..., -1:] > 0
    return outputs[..., :-1].where(attends, 0).sum((0, 2)), attends.sum((0, 2))


def _call(model: nn.Module, given: Any) -> None:
    if isinstance(given, Tensor):
        model(given)
    elif isinstance(given, Mapping):
        model(**given)
    else:
        raise TypeError(
            f"head_means: a corpus member is {describe(given)}; expected a tensor, which the model is called with, or a"
            " mapping of its arguments, as a tokenizer returns."
        )


class Knockout(observer.Listener):
    """The context manager that `knockout` returns."""

    def __init__(self, model: nn.Module, heads: Mapping[tuple[int, int], str], means: HeadMeans | None) -> None:
        model = inside(model)
        check_model(model, "knockout")
        self._said = f"knockout({type(unwrapped(model)[-1]).__name__})"
        self._heads = _by_layer(self._said, heads, means)
        self._models = unwrapped(model)
        self.roots = self._models + encoders(self._models[-1])
        self._numbers: dict[tuple[str, int], int] = {}  # layers, as `record` numbers them
        self._calls: Counter[str] = Counter()  # attention calls of the open pass, by path
        self._places = Places(self._models)
        self.watches_functions = True
        self._running = self._called = self._with_graph = False
        self._buffers: list[Any] = []
        self._stack: ExitStack | None = None

    def __enter__(self) -> None:
        if self._stack is not None:
            raise RecordingError(f"{self._said}: this block is open already; call knockout again for another.")
        model = self._models[0]
        with ExitStack() as stack:
            parts = parts_of(model)
            check_parts(model, parts, "knockout")
            stack.enter_context(running_eagerly(model, parts, "knockout"))
            for replacement in (
                *observer.replacements(self.roots, watching=True),
                *torch_modules.replacements(parts),
                *huggingface.replacements(),
            ):
                stack.enter_context(replacement.held())
            stack.enter_context(observer.listening(self))
            self._stack, self._called = stack.pop_all(), False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._stack is not None:
            self._stack.close()
        self._stack, self._places, self._buffers = None, Places(self._models), []
        if error is None:
            self._check_seen()

    # --- what the observer reports and asks ---------------------------------------------------------------------

    def begin(self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """A call of the model begins, or of an encoder that is called before it."""
        if self._running or recomputing():
            return False
        self._running = self._called = True
        self._with_graph = torch.is_grad_enabled()
        self._buffers, self._calls = buffers_of([*args, *kwargs.values()]), Counter()
        return True

    def end(self, complete: bool) -> None:
        """A call ended."""
        self._running, self._buffers = False, []

    def change(self, module: nn.Module | None) -> Change | None:
        """What becomes of the heads of the attention call that `module` makes now."""
        path = self._places.of(module) if self._running else None
        if path is None:
            return None
        number = self._numbers.setdefault((path, self._calls[path]), len(self._numbers))
        self._calls[path] += 1
        if number not in self._heads:
            return None
        self._check_computed_once(number, path)
        return Change(self._heads[number], number, path, self._buffers)

    # --- errors -------------------------------------------------------------------------------------------------

    def _check_computed_once(self, number: int, path: str) -> None:
        """Raise under gradient checkpointing: told by its hook, or where it keeps none, by the graph that is off."""
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        by_hook = hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint"
        if by_hook or (self._with_graph and not torch.is_grad_enabled() and self._models[-1].training):
            raise RecordingError(
                f"{self._said}: layer {number} ({path!r}) is under gradient checkpointing, which computes it once more"
                " in the backward pass, when the block may be closed. Switch that off, for example by"
                " model.gradient_checkpointing_disable()."
            )

    def _check_seen(self) -> None:
        if not self._called:
            raise RecordingError(
                f"{self._said}: the model was not called inside the block, so nothing was changed. Call the module that"
                " was passed to knockout, as model(…), in the thread of the block."
            )
        if not self._numbers:
            raise RecordingError(
                f"{self._said}: the model ran, but no attention call was seen, so nothing was changed;"
                " clearhead.record(model) says the likely causes."
            )
        missing = sorted(set(self._heads) - set(self._numbers.values()))
        if missing:
            raise RecordingError(
                f"{self._said}: there is no layer {missing[0]}, so nothing was changed in it; the model made"
                f" {len(self._numbers)} attention calls, layers 0 to {len(self._numbers) - 1}."
            )


def _by_layer(said: str, heads: Mapping[tuple[int, int], str], means: HeadMeans | None) -> dict[int, dict[int, How]]:
    """What becomes of each head, by layer."""
    if not isinstance(heads, Mapping) or not heads:
        raise ValueError(f"{said}: expected heads={{(layer, head): how, …}}, at least one, got {heads!r}.")
    found: dict[int, dict[int, How]] = {}
    for key, kind in heads.items():
        if not isinstance(key, tuple) or len(key) != 2 or any(type(n) is not int or n < 0 for n in key):
            raise ValueError(f"{said}: {key!r} is no (layer, head): two integers from 0, as in L17H5 → (17, 5).")
        if kind not in KINDS:
            raise ValueError(f"{said}: head {key} cannot be {kind!r}; expected one of {', '.join(KINDS)}.")
        layer, head = key
        found.setdefault(layer, {})[head] = _mean(said, layer, head, means) if kind == "mean" else kind
    return found


def _mean(said: str, layer: int, head: int, means: HeadMeans | None) -> Tensor:
    if means is not None and not isinstance(means, Mapping):
        raise ValueError(
            f"{said}: means={describe(means)}; expected them by layer, as head_means(model, corpus) gives."
        )
    if means is None or layer not in means:
        raise ValueError(
            f"{said}: head ({layer}, {head}) is to be its mean output, and there is none of layer {layer}. Pass"
            " means=clearhead.heads.head_means(model, corpus)."
        )
    if not isinstance(means[layer], Tensor) or not bool(torch.isfinite(means[layer]).all()):
        raise ValueError(
            f"{said}: the means of layer {layer} are {describe(means[layer])}; expected a tensor (H, Dv) of finite"
            " numbers."
        )
    if head >= len(means[layer]):
        raise ValueError(f"{said}: there is no head {head}; means of layer {layer} have {len(means[layer])}.")
    return means[layer][head]
