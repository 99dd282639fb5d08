"""What a block has seen: passes (calls of the model), and texts that passes have grown, as sequences of layer maps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from clearhead._format import size
from clearhead.errors import RecordingError
from clearhead.recording.layers import Joined, Kept, Layer, Link, Reduced
from clearhead.recording.sequence import Group, Maps, held, summary
from clearhead.recording.sides import side_of

__all__ = ["Group", "Pass", "Recording", "Text"]


class Pass(Maps):
    """One call of the recorded model: its maps in the order of the attention calls.

    `results` holds what `record(keep=…)` made of them, by label.
    """

    def __init__(self) -> None:
        self._layers: list[Kept] = []
        self.results: dict[str, Any] = {}
        self.way: str | None = None  # of generating, where such calls make no one text

    @staticmethod
    def after(parts: Iterable[Pass]) -> Pass:
        """A pass that begins with the layers of these."""
        whole = Pass()
        for part in parts:
            whole._layers.extend(part._layers)
            whole.results.update(part.results)
        return whole

    def add(self, layer: Layer) -> None:
        """Append the next attention call."""
        self._layers.append(layer)

    def reduce(self, layer: Layer, result: Any) -> None:
        """Append the next attention call, of which only this result is kept."""
        self._layers.append(Reduced(layer))
        self.results[layer.label] = result

    @property
    def goes_on(self) -> bool:
        """Whether every layer goes on from the pass before: its keys are those and one more for each query.

        Keys that are the same in both go with that, but are enough only where cross-attention alone was recorded.
        """
        layers = [layer for layer in self._layers if isinstance(layer, Layer) and layer.link is not Link.NONE]
        if self.way is not None or len(layers) < len(self._layers) or not layers:
            return False
        paths = [layer.path for layer in layers]
        grown = {layer.shape[2] for layer in layers if layer.link is Link.GROWN}
        return len(grown) == 1 if grown else all(side_of(path, paths) == "cross" for path in paths)

    @property
    def is_step(self) -> bool:
        """Whether it looks like one step of a generation: more keys than queries in self-attention."""
        paths = [layer.path for layer in self._layers]
        return any(n.shape[3] > n.shape[2] and side_of(n.path, paths) != "cross" for n in self._layers)

    def _kept(self, asked: str) -> list[Kept]:
        return self._layers

    def __repr__(self) -> str:
        return f"Pass({summary(self._layers)})"


class Text(Maps):
    """Passes that go on from one another, as `generate` makes them: one map a layer over all tokens.

    Row t holds the weights as they were when token t was the query; the last token that was generated never is one.
    """

    def __init__(self, first: Pass) -> None:
        self.passes = [first]
        self._calls = {layer.number: [layer] for layer in first._layers}
        self._layers = first._layers

    def add(self, step: Pass) -> None:
        """Append the next pass."""
        self.passes.append(step)
        for layer in step._layers:
            self._calls[layer.number].append(layer)
        self._layers = []  # made when asked for

    def last(self, number: int) -> Layer | None:
        """The latest call of a layer."""
        call = self._calls.get(number, [None])[-1]
        return call if isinstance(call, Layer) else None

    def _kept(self, asked: str) -> list[Kept]:
        if not self._layers:
            self._layers = [
                Joined([call for call in calls if isinstance(call, Layer)]) if len(calls) > 1 else calls[0]
                for calls in self._calls.values()
            ]
        return self._layers

    def __repr__(self) -> str:
        return f"Text(passes={len(self.passes)}, {summary(self._kept('repr'))})"


class Recording(Maps):
    """What `clearhead.record` has seen.

    A sequence of layer maps where the model was called once, or generated one text. Maps are indexed by position
    (`recording[17]`, `recording[-1]`, `recording[2:5]`), module path, or (path, number of the call) where a module is
    called several times. `.passes` holds one such sequence for each call of the model, `.texts` one for each text:
    calls whose keys go on from one another, joined. Of those q and k are kept and v is not.

    `.encoder`, `.decoder` and `.cross` are the layers of each side of an encoder-decoder model. With
    `record(keep=function)` there are no maps: `.results` are what the function returned, by label ("L17").
    """

    def __init__(self) -> None:
        self.passes: list[Pass] = []
        self.texts: list[Text] = []

    def add(self, each: Pass) -> None:
        """Append the next call of the model: to the last text, or as a new one."""
        self.passes.append(each)
        if self.texts and each.goes_on:
            self.texts[-1].add(each)
        else:
            self.texts.append(Text(each))

    def last(self, number: int) -> Layer | None:
        """The call from which the next one of this layer may go on."""
        return self.texts[-1].last(number) if self.texts else None

    def _kept(self, asked: str) -> list[Kept]:
        if len(self.texts) == 1 and self.passes[0].way is None:
            return self.texts[0]._kept(asked)
        raise self._not_one(asked, "recording")

    def _not_one(self, asked: str, what: str) -> RecordingError:
        """What to say where there is no one text."""
        if not self.passes:
            return RecordingError(f"{asked}: nothing is recorded; no call of the model has ended in this block yet.")
        called = f"{asked}: the model was called {len(self.passes)} times in this block"
        name = "" if what == "recording" else f".{what}"
        which = f"recording.passes[0]{name} … recording.passes[{len(self.passes) - 1}]{name}"
        broken = self._broken()
        if broken is not None:
            called += f", and {broken}; such calls do not make one text"
            which += ". For one map a layer, call the model on the text that came out, in a block of its own"
        elif len(self.texts) < len(self.passes) and what == "recording":
            which += f", or which text: recording.texts[0] … recording.texts[{len(self.texts) - 1}]"
        return RecordingError(f"{called}. Say which call: {which}.")

    def _broken(self) -> str | None:
        """Why the calls of a generation are no one text; None where they are, or are calls of no generation."""
        way = next((each.way for each in self.passes if each.way is not None), None)
        if way is not None:
            return way
        step = next((text.passes[0] for text in self.texts[1:] if text.passes[0].is_step), None)
        return None if step is None else _why_not(step, next(n for n, each in enumerate(self.passes) if each is step))

    @property
    def results(self) -> dict[str, Any]:
        """What `record(keep=function)` made of each map of the only call, by label; of several, ask each pass."""
        if len(self.passes) != 1:
            raise self._not_one("recording.results", "results")
        return self.passes[0].results

    @property
    def nbytes(self) -> int:
        """Bytes that are held by all passes: each storage once."""
        return held([layer for each in self.passes for layer in each._kept("recording.nbytes")])

    @property
    def dense_nbytes(self) -> int:
        """Bytes that the weights of all texts would take as tensors."""
        return sum(each.dense_nbytes for each in self.texts)

    def __repr__(self) -> str:
        if len(self.passes) == 1:
            return f"Recording({summary(self._kept('repr'))})"
        if len(self.texts) == 1:
            return f"Recording(passes={len(self.passes)}, {summary(self._kept('repr'))})"
        return f"Recording(passes={len(self.passes)}; holds {size(self.nbytes)})"


def _why_not(step: Pass, n: int) -> str:
    """Why a step, the n-th call, does not go on from the call before."""
    if not all(layer.has_keys for layer in step._layers if isinstance(layer, Layer)):
        return (
            f"call {n} cannot be told to go on from call {n - 1}: of some layers the weights alone are known, not keys"
        )
    return (
        f"call {n} does not go on from call {n - 1}: its keys are not those and new ones (decoding may reorder them or"
        " take some back, a quantised cache rounds them)"
    )
