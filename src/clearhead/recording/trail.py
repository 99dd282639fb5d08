"""What recent results were made of: notes by weak reference, kept only while the model runs.

Changes in place are noticed by the tensors' versions. (Inference tensors have none: there the comparison on one
query has to show them.)
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeGuard

import torch
from torch import Tensor, nn

from clearhead._checks import describe
from clearhead._watch import version_of
from clearhead.errors import RecordingError
from clearhead.recording.calls import AnyCall, check_lasting
from clearhead.recording.changing import written
from clearhead.recording.formula import Part, Scores, read_back, weights_call

__all__ = [
    "Attention",
    "Folded",
    "How",
    "Made",
    "Softmax",
    "Step",
    "Trail",
    "Turned",
    "Weights",
    "is_parameter",
    "is_plain",
]

_RECENT = 256  # results that notes are kept about


@dataclass(frozen=True)
class Folded:
    """q whose batch and heads were made one dimension."""

    heads: tuple[int, ...]  # (B, H)
    at: int = 0  # which dimension that is


@dataclass(eq=False)
class Softmax:
    """One softmax, however many tensors are made of its result."""

    scores: Scores | None
    compares: bool = False  # its scores were a product of queries and keys
    told: bool = False
    changed: bool = False  # by a knockout, as it was told


@dataclass(frozen=True, eq=False)
class Weights:
    """The result of a softmax, or what became of it."""

    softmax: Softmax
    made: Tensor | None = None  # the weights as made; None: the tensor that the note is about
    zeroed: tuple[Part, ...] = ()
    dropped: bool = False  # went through dropout

    def of(self, x: Tensor) -> Tensor:
        """The weights as made, x being the tensor that the note is about."""
        return x if self.made is None else self.made

    def written(self, x: Tensor) -> Weights:
        """Where something may have been written to x, the tensor that the note is about: x counts, if it is a copy."""
        shared = self.made is not None and self.made.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        return self if shared else self.set_to_zero(())

    def set_to_zero(self, where: tuple[Part, ...]) -> Weights:
        """With zeros in some places: what is reported then, unless dropout came before."""
        return replace(self, zeroed=self.zeroed + where, made=self.made if self.dropped else None)


@dataclass(frozen=True, eq=False)
class Turned:
    """Weights whose last two dimensions changed places: (…, S, T)."""

    weights: Weights


@dataclass(frozen=True, eq=False)
class Attention:
    """weights @ v."""

    weights: Weights
    left: Tensor
    v: Tensor
    heads: tuple[int, ...]  # (B, H), where v's are one dimension and that is known
    order: tuple[int, ...] | None = None  # the dimensions of the result as (…, T, Dv); None where that is not known

    def written(self, result: Tensor, call: AnyCall, brought: Mapping[int, Tensor]) -> Tensor:
        """The result of the product, in which some heads (B, T, Dv) are changed."""
        if self.order is None:
            raise RecordingError(
                f"knockout: what the heads bring cannot be told apart in {describe(result)}, the product of attention"
                f" weights {tuple(self.left.shape)} with values. Write it as weights @ v."
            )
        heads = result.permute(self.order)
        made = written(heads.reshape(*call.shape[:3], -1), brought).reshape(heads.shape)
        return made.permute(sorted(range(made.ndim), key=self.order.__getitem__))


Made: TypeAlias = "Folded | Scores | Weights | Turned | Attention"


@dataclass(frozen=True, eq=False)
class Step:
    """A function that was called: its arguments by name, what is known of them, its result."""

    given: Mapping[str, Any]
    known: Mapping[str, Made]
    result: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the result."""
        return tuple(self.result.shape)


@dataclass(frozen=True)
class How:
    """How the calls of a function are read."""

    read: Callable[[Step], Made | None]
    names: tuple[str, ...]  # of its positional arguments
    begins: Callable[[tuple[Any, ...]], bool]  # whether there may be something to note when nothing is known yet


@dataclass(frozen=True, eq=False)
class _Note:
    about: weakref.ref[Tensor]
    version: int
    made: Made


class Trail:
    """What recent results were made of; reports each attention that it leads to."""

    def __init__(self, see: Callable[[AnyCall], Mapping[int, Tensor]]) -> None:
        self._see = see
        self._notes: dict[int, _Note] = {}

    def clear(self) -> None:
        """Forget everything."""
        self._notes.clear()

    def follow(self, func: Callable[..., Any], how: How, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`func(*args, **kwargs)`, noting what its result is made of."""
        noted = self._notes and (self._noted(args) or (kwargs and self._noted(kwargs.values())))
        if not noted and not how.begins(args):
            return func(*args, **kwargs)
        given = {**dict(zip(how.names, _flat(args), strict=False)), **kwargs}
        known = self._known(given)  # before the call, which may write to its arguments
        result = func(*args, **kwargs)
        about = result if isinstance(result, Tensor) else given.get("input")
        if not is_plain(about):
            return result
        made = how.read(Step(given, known, about))
        if isinstance(made, Attention):
            return self._report(made, result)
        if made is not None:
            self._note(made, about)
        return result

    def _noted(self, values: Iterable[object]) -> bool:
        """Whether there may be a note about one of them; of most calls nothing is known, and this is all they cost."""
        return any(map(self._notes.__contains__, map(id, values)))

    def _known(self, given: Mapping[str, Any]) -> dict[str, Made]:
        found = {name: self._find(value) for name, value in given.items() if isinstance(value, Tensor)}
        return {name: made for name, made in found.items() if made is not None}

    def _find(self, x: Tensor) -> Made | None:
        note = self._notes.get(id(x))
        if note is None or note.about() is not x:
            return None
        if note.version == version_of(x):
            return note.made
        if not isinstance(note.made, (Weights, Turned)):
            return None  # written to by a function that is not followed
        return _written(note.made, x)

    def _note(self, made: Made, about: Tensor) -> None:
        key = id(about)
        while len(self._notes) >= _RECENT:
            self._notes.pop(next(iter(self._notes)), None)
        notes = self._notes

        def gone(ref: weakref.ref[Tensor]) -> None:
            if key in notes and notes[key].about is ref:
                del notes[key]

        notes.pop(key, None)
        notes[key] = _Note(weakref.ref(about, gone), version_of(about), made)

    def _report(self, attention: Attention, result: Tensor) -> Tensor:
        """Tell of an attention that was computed; its result, in which a block may have changed heads."""
        made = attention.weights
        if attention.left.is_inference():  # these do not tell whether they were written to
            made = made.written(attention.left)
        softmax, weights = made.softmax, made.of(attention.left)
        if softmax.changed:
            raise RecordingError(
                f"knockout: attention weights {tuple(weights.shape)} are multiplied by values a second time, where the"
                " heads would still be as they were. This layer cannot be changed."
            )
        if softmax.told:
            return result
        check_lasting(weights)
        v = Part(attention.v, tuple(attention.left.shape[:-2]))
        scores = softmax.scores
        if weights.ndim == 2 and not _is_self_attention(scores):
            return result
        call = None if scores is None else read_back(scores, made.zeroed, weights, v)
        if call is None and weights.ndim == 2:
            return result
        told = weights_call(weights, scores, attention.heads, v) if call is None else call
        brought = self._see(told)
        softmax.told, softmax.changed = True, bool(brought)
        return attention.written(result, told, brought) if brought else result


def _written(made: Weights | Turned, x: Tensor) -> Weights | Turned:
    """Where x, the tensor that the note is about, was written to: the weights then are what they are now."""
    if isinstance(made, Turned):
        made.weights.softmax.scores = None
        return Turned(made.weights.written(x.mT))
    made.softmax.scores = None
    return made.written(x)


def _flat(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments, the list of operands that an einsum may be given taken apart."""
    apart = len(args) == 2 and isinstance(args[0], str) and isinstance(args[1], (list, tuple))
    return (args[0], *args[1]) if apart else args


def is_plain(x: object) -> TypeGuard[Tensor]:
    """A dense tensor of numbers with a fraction, and no kind of its own."""
    usual = type(x) in (Tensor, nn.Parameter)
    return usual and x.is_floating_point() and not x.is_nested and x.layout == torch.strided  # type: ignore[attr-defined]


def is_parameter(x: Tensor) -> bool:
    """Whether this is learned, or a view of it."""
    return isinstance(x, nn.Parameter) or isinstance(x._base, nn.Parameter)


def _is_self_attention(scores: Scores | None) -> bool:
    """Whether these are T×T scores of queries and keys that were computed, not learned."""
    return scores is not None and scores.computed and scores.shape[-2] == scores.shape[-1]
