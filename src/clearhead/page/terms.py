"""Where the numbers of a derivation come from and go to: the largest products in x W_Q, and in z W_O.

A number of q is a sum of as many products as the layer's input has numbers. The page shows the three largest and the
rest, of the number of q that weighs most in the comparison; of a layer small enough to write out, all of all. It does
the same with what the head adds to the layer's output, at the place where it adds most. So a token takes 120 bytes a
head, where W_Q and W_O of a head of a small language model take 295 kB.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from clearhead.maps.softmax import SoftmaxMap
from clearhead.page.encode import float_planes
from clearhead.projections import Part, Projection, brought_by_heads

__all__ = ["Terms"]

WRITTEN_OUT = 4  # numbers of a vector that are all shown
TOLD = 3  # products that are shown of a longer sum


@dataclass(frozen=True)
class Terms:
    """The products of one layer.

    attn: its map (1, H, T, S) with v. projection: what is known of its matrices.
    """

    attn: SoftmaxMap
    projection: Projection

    @property
    def facts(self) -> dict[str, Any]:
        """JSON: of which parts there are numbers, how many each, and why there are none of others."""
        return {"project": self._project_facts(), "output": self._output_facts()}

    def pack(self, h: int, queries: Tensor | None = None, keys: Tensor | None = None) -> bytes:
        """The facts as a line of JSON, then the numbers of a head as four byte planes of float32."""
        return json.dumps(self.facts).encode() + b"\n" + float_planes(self.of(h, queries, keys).numpy())

    @torch.no_grad()
    def of(self, h: int, queries: Tensor | None = None, keys: Tensor | None = None) -> Tensor:
        """The numbers of a head, one part after another: of q for the queries, k and v for the keys, then the output.

        A number of q, k or v: its place c, x W + b there, the place it is turned with and x W + b there, cos, sin, b,
        then m, x[m], W[m, c] for each product shown. A number of the output: its place, what this head adds, what the
        others add, the bias, their sum, then c, z[c], W_O[c, place].

        Args: queries, keys: positions; all by default.
        """
        both = zip((queries, keys), self.attn.shape[-2:], strict=True)
        queries, keys = (torch.arange(n) if at is None else at for at, n in both)
        parts = [self._input_terms(name, h, queries if name == "q" else keys) for name in self._known()]
        if self.projection.out is not None:
            parts.append(self._output_terms(self.projection.out, h, queries))
        return torch.cat([part.flatten() for part in parts]) if parts else torch.zeros(0)

    # --- what there is --------------------------------------------------------------------------------------

    def _recorded(self, name: str) -> Tensor:  # (H or G, T, D)
        tensor = {"q": self.attn.q, "k": self.attn.k, "v": self.attn.v}[name]
        if tensor is None:
            raise ValueError("Terms(attn): the map of a derivation needs its values")
        return tensor[0]

    def _part(self, name: str) -> Part | None:
        return {"q": self.projection.q, "k": self.projection.k, "v": self.projection.v}[name]

    def _known(self) -> list[str]:
        """The parts of which there are numbers: of k and v only where all are written out."""
        small = max(self._recorded(name).shape[-1] for name in "qv") <= WRITTEN_OUT
        if self.projection.why:
            return []
        return [name for name in ("qkv" if small else "q") if self._part(name) is not None]

    def _project_facts(self) -> dict[str, Any]:
        known, x = self.projection, self.projection.x
        if x is None or known.why:
            return {"why": known.why}
        turn, D = known.q.turn if known.q is not None else None, self.attn.q.shape[-1]
        alone = turn is not None and bool((turn.partner == torch.arange(D)).all())
        return {
            "of": self._known(),
            "same": [name for name in "qkv" if name in known.same],
            "inputs": x.shape[-1],
            "places": {name: _places(self._recorded(name).shape[-1]) for name in self._known()},
            "products": _products(x.shape[-1]),
            "turn": "" if turn is None else "factor" if alone else "turn",
            "bias": any(part is not None and bool(part.bias.any()) for part in map(self._part, self._known())),
        }

    def _output_facts(self) -> dict[str, Any]:
        part = self.projection.out
        if part is not None:
            width, Dv = part.matrix.shape[1], part.places.shape[1]
            bias = bool(part.bias.any())
            return {"width": width, "places": _places(width), "products": _products(Dv), "bias": bias}
        if "out" in self.projection.same:
            return {"same": True}
        unseen = self.projection.x is None and self.projection.q is None  # nothing was searched
        return {"why": self.projection.why if unseen else "no matrix of this layer gives its output of its heads alone"}

    # --- the numbers ----------------------------------------------------------------------------------------

    def _input_terms(self, name: str, h: int, at: Tensor) -> Tensor:
        """(n, places, 7 + 3 products)."""
        part, x = self._part(name), self.projection.x
        if part is None or x is None:
            raise ValueError(f"Terms.of({h}): nothing is known of {name}")
        own = h if name == "q" else self._group(h)
        recorded, columns = _plain(self._recorded(name)[own][at]), part.places[own]
        matrix, bias, given = _plain(part.matrix[:, columns]), _plain(part.bias[columns]), _plain(x[at])
        # Where nothing turns it, q is the product: what its dtype rounded away belongs to the rest.
        product = recorded if part.turn is None else given @ matrix + bias
        rows, blocks = torch.arange(len(at)), []
        for c in self._places_of(name, h, recorded).mT:
            cos, sin, other = torch.ones(len(at)), torch.zeros(len(at)), c
            if part.turn is not None:
                other = part.turn.partner[c]
                cos, sin = part.turn.coefficients(product, recorded, c)
            told = _largest(given, matrix[:, c].mT)
            head = torch.stack([c, product[rows, c], other, product[rows, other], cos, sin, bias[c]], 1)
            blocks.append(torch.cat([head.float(), told], 1))
        return torch.stack(blocks, 1)

    def _places_of(self, name: str, h: int, recorded: Tensor) -> Tensor:
        """The places (n, C) to show: all of few; of many the one of q that weighs most against the keys."""
        D = recorded.shape[-1]
        if D <= WRITTEN_OUT or name != "q":
            return torch.arange(D).expand(len(recorded), D)
        keys = _plain(self._recorded("k")[self._group(h)])
        weight: Tensor = recorded.abs() * keys.norm(dim=0)
        return weight.argmax(-1, keepdim=True)

    def _output_terms(self, part: Part, h: int, at: Tensor) -> Tensor:
        """(n, places, 5 + 3 products)."""
        matrix, bias, z = _plain(part.matrix), _plain(part.bias), self._brought(at)
        whole = z.transpose(0, 1).flatten(1) @ matrix + bias  # (n, width)
        own = matrix[part.places[h]]  # (Dv, width)
        mine, width, rows = z[h] @ own, own.shape[1], torch.arange(len(at))
        places = torch.arange(width).expand(len(at), width) if width <= WRITTEN_OUT else mine.abs().argmax(-1, True)
        blocks = []
        for m in places.mT:
            added, total = mine[rows, m], whole[rows, m]
            head = torch.stack([m, added, total - added - bias[m], bias[m], total], 1)
            blocks.append(torch.cat([head, _largest(z[h], own[:, m].mT)], 1))
        return torch.stack(blocks, 1)

    def _brought(self, at: Tensor) -> Tensor:
        """What each head brings to the tokens `at`: (H, n, Dv)."""
        v = self._recorded("v")
        if len(at) > len(v[0]) // 2:
            return _plain((self.attn @ v[None])[0])[:, at]
        return _plain(brought_by_heads(self.attn, v, at))

    def _group(self, h: int) -> int:
        return h * self.attn.k.shape[1] // self.attn.shape[1]


def _plain(x: Tensor) -> Tensor:
    return x.detach().float().cpu()


def _places(width: int) -> int:
    return width if width <= WRITTEN_OUT else 1


def _products(terms: int) -> int:
    return terms if terms <= WRITTEN_OUT else TOLD


def _largest(factors: Tensor, weights: Tensor) -> Tensor:
    """The largest products of factors (n, d) and weights (n, d): m, factor, weight of each, (n, 3 products).

    The largest comes first; where all are told they stand in their own order.
    """
    told = _products(factors.shape[1])
    order = (factors * weights).abs().topk(told, dim=-1).indices
    order = order.sort(-1).values if told == factors.shape[1] else order
    return torch.stack([order.float(), factors.gather(1, order), weights.gather(1, order)], -1).flatten(1)
