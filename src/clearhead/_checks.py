"""Arguments checked at the public edge: each message restates the call and says what to do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from clearhead.errors import DTypeError, ShapeError


def describe(value: object) -> str:
    """A tensor by dtype and shape, anything else by its type: never its contents."""
    if isinstance(value, Tensor) and value.is_nested:  # has no shape
        return f"a nested {str(value.dtype).removeprefix('torch.')} tensor of {value.size(0)} parts"
    if isinstance(value, Tensor) and value.layout is not torch.strided:
        layout = str(value.layout).removeprefix("torch.")
        return f"a {layout} {str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)}"
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)}"
    shape = getattr(value, "shape", None)
    return f"{type(value).__name__}" + (f" of shape {tuple(shape)}" if shape is not None else "")


def check_broadcast(what: str, tensor: Tensor, full: tuple[int, int, int, int]) -> None:
    """Raise unless `tensor` (4-D) broadcasts to `full` = (B, H, T, S)."""
    if any(have not in (1, want) for have, want in zip(tensor.shape, full, strict=True)):
        raise ShapeError(f"{what} of shape {tuple(tensor.shape)} does not broadcast to (B, H, T, S) = {full}.")


def four(tensor: Tensor) -> Tensor:
    """(T, D) and (B, T, D) as (1, 1, T, D) and (B, 1, T, D): one head. (B, H, T, D) as it is."""
    if tensor.ndim == 4:
        return tensor
    return tensor[None, None] if tensor.ndim == 2 else tensor[:, None]


def read_broadcast(tensor: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """tensor[b, h, q, k], where a dimension of size 1 has its only entry read once: no copy a head is made."""
    indices = zip((b, h, q, k), tensor.shape, strict=True)
    at = [i if size != 1 else i.new_zeros((1,) * i.ndim) for i, size in indices]
    return tensor[at[0], at[1], at[2], at[3]]


def check_count(call: str, name: str, value: object, *, at_least: int) -> None:
    """Raise unless `value` is an integer of at least `at_least`, NumPy's included."""
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < at_least:
        raise ShapeError(f"{call}({name}={value!r}): expected an integer >= {at_least}.")


def finite_number(call: str, name: str, value: object) -> float:
    """A finite number, or an error that says what arrived."""
    one = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    if isinstance(one, bool) or not isinstance(one, Real) or not math.isfinite(one):
        raise DTypeError(f"{call}({name}={value!r}): expected a finite number.")
    return float(one)


def has_numbers(tensor: Tensor) -> bool:
    """Whether a tensor's values can be asked for: not while a graph is traced, on the meta device, or under vmap."""
    if torch.compiler.is_compiling() or tensor.is_meta or isinstance(tensor, FakeTensor):
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def check_qkv(call: str, q: object, k: object, v: object | None = None) -> None:
    """Raise unless q (…, T, D), k (…, S, D) and v (…, S, Dv) are float tensors that belong together."""
    arrived = f"{call}(q={describe(q)}, k={describe(k)}" + (f", v={describe(v)})" if v is not None else ")")
    tensors = [t for t in (q, k, v) if t is not None]
    if not all(isinstance(t, Tensor) for t in tensors):
        raise DTypeError(f"{arrived}: expected torch tensors; use torch.as_tensor(array) first.")
    _check_dtypes(arrived, tensors)  # type: ignore[arg-type]
    _check_sizes(arrived, *tensors)  # type: ignore[arg-type]


def check_floats(call: str, device: torch.device, **tensors: object) -> None:
    """Raise unless every one is a float tensor on this device."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or tensor.device != device:
            where = f" on {tensor.device}" if isinstance(tensor, Tensor) else ""
            raise DTypeError(f"{call}({name}={describe(tensor)}{where}): expected a float tensor on {device}, as q is.")


def _check_dtypes(arrived: str, tensors: Sequence[Tensor]) -> None:
    if not all(t.is_floating_point() and t.dtype.itemsize > 1 for t in tensors):
        raise DTypeError(f"{arrived}: expected 16-bit or wider floating-point tensors; convert with .float().")
    if any(t.is_nested or t.layout is not torch.strided for t in tensors):
        raise DTypeError(f"{arrived}: expected dense tensors; convert with .to_dense() or .to_padded_tensor(0.0).")
    if len({t.dtype for t in tensors}) > 1:
        raise DTypeError(f"{arrived}: q, k and v must have one dtype; convert with .to(q.dtype).")
    if len({t.device for t in tensors}) > 1:
        devices = ", ".join(str(t.device) for t in tensors)
        raise DTypeError(f"{arrived}: q, k and v must be on one device, got {devices}.")


def _check_sizes(arrived: str, q: Tensor, k: Tensor, v: Tensor | None = None) -> None:
    if not 2 <= q.ndim <= 4 or k.ndim != q.ndim:
        raise ShapeError(f"{arrived}: expected (B, H, T, D), (B, T, D) or (T, D), and the same rank for q and k.")
    if q.shape[-1] == 0:
        raise ShapeError(f"{arrived}: q and k have no features (D = 0), so there is nothing to compare.")
    if q.shape[-1] != k.shape[-1]:
        raise ShapeError(f"{arrived}: q and k must have the same last dimension D (a score is their dot product).")
    if q.ndim > 2 and q.shape[0] != k.shape[0]:
        raise ShapeError(f"{arrived}: q and k must have the same batch size.")
    if q.ndim == 4 and (k.shape[1] == 0 or q.shape[1] % k.shape[1]):
        raise ShapeError(
            f"{arrived}: the number of query heads must be a multiple of the number of key heads"
            " (query head h reads key head h // (H/G)). The layout is (batch, heads, tokens, width)."
        )
    if v is not None and v.shape[:-1] != k.shape[:-1]:
        raise ShapeError(f"{arrived}: k and v must agree in everything but their width.")


def check_all_finite(call: str, **tensors: Tensor) -> None:
    """Raise unless every number is finite; the message names the first that is not."""
    for name, tensor in tensors.items():
        bad = (~torch.isfinite(tensor)).nonzero()
        if len(bad):
            at = ", ".join(map(str, bad[0].tolist()))
            raise DTypeError(
                f"{call}: {name} ({describe(tensor)}) holds {len(bad)} numbers that are NaN or infinite, the first at"
                f" [{at}]. Fused kernels let them reach other rows even where the mask hides them."
            )


def position(index: int, size: int, what: str) -> int:
    """A Python index, negative ones counted from the end; IndexError that names the size otherwise."""
    if not -size <= index < size:
        raise IndexError(f"{what} {index} is out of range: there are {size}.")
    return index % size


def span(what: str, part: slice, size: int) -> slice:
    """A slice with both ends inside range(size), as Python reads it; a step is refused."""
    if not isinstance(part, slice) or part.step not in (None, 1):
        raise IndexError(f"{what}: expected a slice without a step, got {part!r}.")
    start, stop, _ = part.indices(size)
    return slice(start, max(start, stop))


def index_tensor(index: object, size: int, what: str, device: torch.device) -> Tensor:
    """An int, list, slice or integer tensor as a LongTensor of positions in range(size)."""
    if isinstance(index, slice):
        chosen = range(*index.indices(size))
        return torch.arange(len(chosen), device=device) * chosen.step + chosen.start
    try:
        at = torch.as_tensor(index, device=device)
    except (TypeError, ValueError, RuntimeError):
        raise DTypeError(f"{what}: expected integers, a slice or a bool tensor, got {describe(index)}.") from None
    if at.dtype == torch.bool:
        if at.shape != (size,):
            raise ShapeError(f"{what}: a bool index needs shape ({size},), got {tuple(at.shape)}.")
        return at.nonzero().squeeze(-1)
    if at.numel() == 0:
        return at.long()
    if at.is_floating_point():
        raise DTypeError(f"{what}: expected integers, got {describe(at)}.")
    if has_numbers(at) and (int(at.min()) < -size or int(at.max()) >= size):
        raise IndexError(f"{what}: an index in [{int(at.min())}, {int(at.max())}] is out of range: there are {size}.")
    return at.long() % size
