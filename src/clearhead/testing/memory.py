"""How much PyTorch allocated: tracemalloc does not see tensors, a dispatch mode does."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the memory that operations inside the block allocate (not what happens inside one fused kernel).

    Attributes: `calls`, the number of operations that gave a tensor; `largest`, the largest single tensor in
    bytes; `peak`, the most bytes that were alive at once, without those alive before the block.

    >>> import torch
    >>> with Allocations() as allocations:
    ...     y = torch.ones(1000) + 1
    >>> allocations.calls, allocations.largest, allocations.peak
    (2, 4000, 8000)
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = self.largest = self.peak = self._live = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {_address(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.calls += bool(tensors)
        for leaf in tensors:
            if _address(leaf) not in before | self._seen:
                self._count(leaf)
        return result

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        address, size = _address(tensor), storage.nbytes()
        self.largest, self._live = max(self.largest, size), self._live + size
        self.peak = max(self.peak, self._live)
        self._seen.add(address)
        weakref.finalize(storage, self._release, address, size)

    def _release(self, address: int, size: int) -> None:
        self._live -= size
        self._seen.discard(address)


def _address(tensor: Tensor) -> int:
    """Which storage a tensor looks into: views share it."""
    return int(tensor.untyped_storage()._cdata)
