"""Which matrix of a layer gives the recorded queries of its input, and which its output of what the heads bring."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from clearhead.maps.softmax import SoftmaxMap
from clearhead.projections.turning import Turn, find_turn
from clearhead.projections.watch import Watch, rows_of

__all__ = ["Part", "Projection", "find"]


@dataclass(frozen=True)
class Part:
    """x ↦ x @ matrix + bias, of which some columns (or rows) belong to each head.

    matrix: (d_in, N). bias: (N,), zeros where there is none. places: (H, D) columns of a head; of W_O, its rows.
    turn: what happens to the product before it is compared; None if nothing does.
    """

    matrix: Tensor
    bias: Tensor
    places: Tensor
    turn: Turn | None = None


@dataclass(frozen=True)
class Projection:
    """What is known of how a layer gets q, k and v of its input x (T, d_in), and its output of its heads.

    x is None where the input is not known. q, k, v, out are None where no matrix fits; `same` names those of "q", "k",
    "v" that are the input itself, and "out" where the output is the heads side by side. why: a sentence, where q or x
    is not known.
    """

    x: Tensor | None = None
    q: Part | None = None
    k: Part | None = None
    v: Part | None = None
    out: Part | None = None
    same: frozenset[str] = frozenset()
    why: str = ""


@torch.no_grad()
def find(
    attn: SoftmaxMap,  # (1, H, T, T)
    model: nn.Module,
    watch: Watch,
    path: str,
    *,
    x: Tensor | None = None,  # (T, d_in)
    out: Tensor | None = None,  # (3, d_out)
) -> Projection:
    """Search the matrices of the layer `model.get_submodule(path)`, which made the map.

    `x` and `out` are its input and `rows_of` its output, where the caller knows them; else they are as watched.

    Cost: a product of three rows with each matrix of the layer.
    """
    calls = sorted(call for at, call in watch.rows if at == path) if x is None else [0]
    found = [_of_call(attn, model, watch, path, call, x, out) for call in calls]
    # A model may call one layer many times: which of them made the map, the numbers tell.
    found.sort(key=lambda one: (one.q is None and "q" not in one.same, one.out is None and "out" not in one.same))
    return found[0] if found else Projection(why="the input of this layer was not seen")


def _of_call(
    attn: SoftmaxMap, model: nn.Module, watch: Watch, path: str, call: int, x: Tensor | None, out: Tensor | None
) -> Projection:
    matrices = list(_matrices(model, path))
    rows = watch.rows[path, call] if x is None else rows_of(x)
    found: dict[str, Part | None] = {}
    same = set()
    for name, recorded in {"q": attn.q, "k": attn.k, "v": attn.v}.items():
        wanted = None if recorded is None else rows_of(recorded[0].movedim(0, 1))  # (3, H, D)
        if wanted is not None and _close(rows, wanted.flatten(1)):
            same.add(name)
        elif wanted is not None:
            found[name] = _input_part(matrices, rows, wanted, name, attn)
    final, unprojected = _output(attn, model, watch, path, call, out)
    same |= {"out"} if unprojected else set()
    x, why = watch.inputs.get((path, call)) if x is None else x, ""
    if found.get("q") is None and "q" not in same:
        why = "no matrix of this layer gives its queries of its input alone"
    elif x is None:
        why = "the inputs of the layers are not kept for a text this long"
    return Projection(x, found.get("q"), found.get("k"), found.get("v"), final, frozenset(same), why)


_Named: TypeAlias = tuple[str, Tensor, "Tensor | None"]  # a matrix by name, and the bias that stands beside it


def _matrices(model: nn.Module, path: str) -> Iterator[_Named]:
    """Every matrix below a path."""
    own = dict(model.get_submodule(path).named_parameters(prefix=path))
    for name, matrix in own.items():
        if matrix.ndim == 2 and matrix.is_floating_point():
            bias = own.get(name.replace("weight", "bias"))
            yield name, matrix.detach(), bias.detach() if bias is not None and bias.ndim == 1 else None


def _input_part(matrices: Iterable[_Named], rows: Tensor, wanted: Tensor, name: str, attn: SoftmaxMap) -> Part | None:
    for _, matrix, bias, product in _products(matrices, rows):
        for places in _places(name, matrix.shape[1], attn):
            guess = product[:, places]
            same = _close(guess, wanted)
            turn = None if same else find_turn(guess, wanted)
            if same or turn is not None:
                return Part(matrix, bias, places, turn)
    return None


def _products(matrices: Iterable[_Named], rows: Tensor) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    """Each matrix that can be multiplied by these rows: its name, itself as (d_in, N), its bias, the product."""
    for name, parameter, beside in matrices:
        for matrix in _oriented(parameter, rows.shape[-1]):
            bias = matrix.new_zeros(matrix.shape[1]) if beside is None else beside
            if len(bias) == matrix.shape[1]:
                yield name, matrix, bias, rows.float() @ matrix.float() + bias.float()


def _oriented(matrix: Tensor, inputs: int) -> Iterator[Tensor]:
    """As (d_in, N): `nn.Linear` keeps its matrix the other way round, GPT-2's layers and bare ones do not."""
    if matrix.shape[1] == inputs:
        yield matrix.mT
    if matrix.shape[0] == inputs:
        yield matrix


def _places(name: str, columns: int, attn: SoftmaxMap) -> Iterator[Tensor]:
    """Where the columns of each head may stand: alone, in blocks q k v, per head q k v, or per group of heads."""
    (H, D), (G, Dv) = attn.q.shape[1::2], (attn.k.shape[1], attn.v.shape[-1] if attn.v is not None else 0)
    of, (own, first) = H if name == "q" else G, {"q": (D, 0), "k": (D, H * D), "v": (Dv, H * D + G * D)}[name]
    if columns == of * own:
        yield torch.arange(of * own).view(of, own)
    if columns == H * D + G * D + G * Dv:
        yield first + torch.arange(of * own).view(of, own)
        each, inside = H // G, torch.arange(columns).view(G, -1)  # a group: its queries, its key, its value
        bounds = {"q": (0, each * D), "k": (each * D, each * D + D), "v": (each * D + D, each * D + D + Dv)}[name]
        yield inside[:, slice(*bounds)].reshape(of, own)


def _output(
    attn: SoftmaxMap, model: nn.Module, watch: Watch, path: str, call: int, out: Tensor | None
) -> tuple[Part | None, bool]:
    """The part that makes the output, and whether there is none because the heads themselves are the output."""
    if attn.v is None:
        return None, False
    rows = rows_of(torch.arange(attn.shape[-2]))
    brought = brought_by_heads(attn, attn.v[0], rows).transpose(0, 1).flatten(1)  # (3, H * Dv)
    returned = watch.outputs.get((path, call)) if out is None else out
    above = path.rpartition(".")[0]
    for parent in dict.fromkeys((path, above)):
        for name, matrix, bias, product in _products(_matrices(model, parent), brought):
            given = watch.outputs.get((name.rpartition(".")[0], call), returned)
            if given is not None and _close(product, given):
                places = torch.arange(len(matrix)).view(attn.shape[1], -1)
                return Part(matrix, bias, places), False
    return None, returned is not None and _close(brought, returned)


def brought_by_heads(attn: SoftmaxMap, v: Tensor, at: Tensor) -> Tensor:
    """What each head of a map (1, H, T, S) brings to the tokens `at`, of values v (G, S, Dv): (H, n, Dv)."""
    values = v.to(attn.dtype).repeat_interleave(attn.shape[1] // len(v), 0)  # one for each query head
    return torch.cat([attn[0, :, t].unsqueeze(1) @ values for t in at.tolist()], 1)


def _close(guess: Tensor, wanted: Tensor) -> bool:
    """Equal but for the rounding of the model's dtype."""
    if guess.shape != wanted.shape:
        return False
    within = max(4 * torch.finfo(wanted.dtype).eps, 3e-5) * float(wanted.abs().max())
    return bool((guess - wanted.float()).abs().max() <= within)
