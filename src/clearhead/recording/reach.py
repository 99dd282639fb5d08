"""Whether a model can attend in no other way than through transformers' attention interface.

Then seam 1 sees all there is, and nobody has to watch every function that the model calls, which takes a tenth of a
short forward pass. It is read off the code that `forward` may run: the methods of the model's classes and the
functions that their names lead to. Nothing in it may be called softmax, or be a function of PyTorch or clearhead that
attends, nor may there be code that is not transformers' or of PyTorch's layers, a hook, or a method of a single module.
In doubt the answer is no, which costs time and nothing else.
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Collection, Iterable, Iterator, Mapping
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module

__all__ = ["attends_by_interface_alone"]

_KNOWN = ("transformers.", "torch.nn.modules.")  # whose classes are read
_ATTENDS = (
    "softmax",
    "scaled_dot_product_attention",
    "multi_head_attention_forward",
    "multiheadattention",
    "_transformer_encoder_layer_fwd",
)
_ONLY_WITH = {"_upcast_and_reordered_attn": "reorder_and_upcast_attn"}  # GPT-2's: a method, and the flag it is run with
_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks")


def attends_by_interface_alone(parts: Collection[nn.Module]) -> bool:
    """Whether these modules of a model call attention by `AttentionInterface.get_interface`, if at all.

    Cost: some microseconds for each part, and milliseconds once for each kind of model.
    """
    kinds = frozenset(map(type, parts))
    if not all(cls.__module__.startswith(_KNOWN) for cls in kinds) or any(getattr(torch_module, h) for h in _HOOKS):
        return False
    reach = _reach(kinds)
    if not reach.is_current:
        _reach.cache_clear()
        reach = _reach(kinds)
    return reach.quiet and reach.holds_for(parts)


@functools.lru_cache(maxsize=32)
def _reach(kinds: frozenset[type]) -> _Reach:
    return _Reach(kinds)


class _Reach:
    """The code that the forward of modules of these kinds may run, found by name."""

    def __init__(self, kinds: frozenset[type]) -> None:
        bases = {base for cls in kinds for base in cls.__mro__ if base not in nn.Module.__mro__}
        self._spaces = [vars(base) for base in bases]
        self._sizes = [_size(space) for space in self._spaces]
        self._found: list[tuple[Mapping[str, Any], str, Any]] = []  # what was read, and where it stood
        self._names: set[str] = set()
        self._flags: set[str] = set()  # that must be off
        self._read: set[FunctionType] = set()
        self.quiet = all(_is_known(base) for base in bases)
        self._add({"forward", "__call__"})
        called = ((space, name) for space in self._spaces for name in self._names.intersection(space))
        self._methods = frozenset(name for space, name in called if _function(space[name]) is not None)

    @property
    def is_current(self) -> bool:
        """Whether nobody has put other code in the place of what was read."""
        same = all(space.get(name) is value or _ours(space.get(name)) is value for space, name, value in self._found)
        return same and self._sizes == [_size(space) for space in self._spaces]

    def holds_for(self, parts: Iterable[nn.Module]) -> bool:
        """Whether these modules run the code of their classes, and nothing besides."""
        for part in parts:
            own = vars(part)
            if own["_forward_hooks"] or own["_forward_pre_hooks"] or not self._methods.isdisjoint(own):
                return False
        return not (self._flags and any(vars(part).get(flag) for part in parts for flag in self._flags))

    def _add(self, names: set[str]) -> None:
        """These names occur in code that may run: any method of that name may."""
        new = names - self._names - _ONLY_WITH.keys()
        self._names |= new
        self._flags |= {_ONLY_WITH[name] for name in _ONLY_WITH.keys() & names}
        self.quiet &= not any(map(_attends, new))
        for space in self._spaces:
            for name in new.intersection(space):
                self._visit(space, name)

    def _visit(self, space: Mapping[str, Any], name: str) -> None:
        self._found.append((space, name, _ours(space[name])))
        self._follow(_ours(space[name]))

    def _follow(self, value: Any) -> None:
        """Read what a name stands for, if it is code, or a table of it."""
        if isinstance(value, Mapping):
            for one in value.values():
                self._follow(one)
        if callable(value):
            self.quiet &= not _attends(str(getattr(value, "__name__", "")))
        function = _function(value)
        if function is None or function in self._read:
            return
        self._read.add(function)
        self.quiet &= _home(function).startswith(("transformers.", "torch."))
        if _home(function).startswith("torch.") and not _is_layer(function):
            return
        for cell in function.__closure__ or ():
            self._follow(_contents(cell))
        for code in _codes(function.__code__):
            self._read_code(code, function.__globals__)

    def _read_code(self, code: CodeType, names: dict[str, Any]) -> None:
        used = set(code.co_names) - _only_for_interface(code)
        if not _home_of(names).startswith("torch."):
            for name in used.intersection(names):
                self._visit(names, name)
        self._add(used)


def _attends(name: str) -> bool:
    attends = name == "flex_attention" or any(what in name.lower() for what in _ATTENDS)
    return attends and name != "log_softmax"


def _is_known(cls: type) -> bool:
    return cls.__module__.startswith(_KNOWN) or cls.__module__ in ("abc", "builtins", "typing")


def _size(space: Mapping[str, Any]) -> int:
    """How much stands in the namespace of a class, what a block puts there not counted."""
    return len(space) - ("__call__" in space)


def _ours(value: Any) -> Any:
    """What one of our own replacements stands for; anything else as it is."""
    while isinstance(value, FunctionType) and _home(value).startswith("clearhead.recording."):
        value = getattr(value, "__wrapped__", None)
    return value


def _function(value: Any) -> FunctionType | None:
    """The Python function behind a method, a property, or a function some of whose arguments are given."""
    while not isinstance(value, FunctionType):
        if isinstance(value, property):
            value = value.fget
        elif isinstance(value, (staticmethod, classmethod, MethodType)):
            value = value.__func__
        elif isinstance(value, functools.partial):
            value = value.func
        else:
            return None
    return value


def _home(function: FunctionType) -> str:
    return _home_of(function.__globals__)


def _home_of(names: Mapping[str, Any]) -> str:
    """The module of a namespace."""
    return str(names.get("__name__"))


def _is_layer(function: FunctionType) -> bool:
    return _home(function).startswith("torch.nn.modules.") and _home(function) != "torch.nn.modules.module"


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # still empty
        return None


def _codes(code: CodeType) -> Iterator[CodeType]:
    """The code and that of functions made in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _only_for_interface(code: CodeType) -> set[str]:
    """The names that stand in `INTERFACE.get_interface(…, default)` and nowhere else: what it gives, seam 1 sees."""
    if "get_interface" not in code.co_names:
        return set()
    given: set[str] = set()
    others: list[str] = []
    inside, before = False, ""
    for each in dis.get_instructions(code):
        if each.argval == "get_interface":
            inside = True
            if before == "LOAD_GLOBAL":
                given.add(others.pop())
        elif each.opname.startswith(("CALL", "PRECALL")):
            inside = False
        elif each.opname == "LOAD_GLOBAL":
            given.add(each.argval) if inside else others.append(each.argval)
        before = each.opname
    return given - set(others)
