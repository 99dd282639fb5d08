"""Linear attention by sums: what the past holds is a matrix of fixed size, not a list of keys.

With φ(x) = elu(x) + 1 in place of the exponential of q·k, the weight of a key is φ(q_t)·φ(k_s), a product, so that the
sum over keys can be taken before the query is known:

    out_t = φ(q_t)ᵀ Σ_s φ(k_s) v_sᵀ / φ(q_t)ᵀ Σ_s φ(k_s)

One more value, always 1, makes numerator and denominator one sum: S = Σ_s φ(k_s) [v_s, 1]ᵀ. Three forms give the same:

    parallel    all pairs at once, (φ(Q) φ(K)ᵀ, masked) [V, 1]      O(T²)       chunk >= T
    recurrent   S_t = S_{t-1} + φ(k_t) [v_t, 1]ᵀ, token by token    O(T)        chunk = 1
    chunked     parallel inside a chunk, S for all that is before   O(T·chunk)  in between: what machines are fast at

Source: Katharopoulos et al. 2020, equations 5 to 7 and 16 to 20.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor
from torch.nn import functional as F

from clearhead._format import size
from clearhead.kernels.grouped import grouped_matmul, no_autocast
from clearhead.kernels.tiles import split


def phi(x: Tensor) -> Tensor:
    """elu(x) + 1, written so that it keeps its digits far below 0: eˣ for x <= 0.

    >>> phi(torch.tensor([-1.0, 0.0, 2.0]))
    tensor([0.3679, 1.0000, 3.0000])
    """
    return torch.where(x > 0, x + 1, torch.exp(x.clamp(max=0)))


def features(k: Tensor, padding: Tensor | None = None) -> Tensor:
    """φ(k) (B, G, S, D) in float32 or wider; 0 where a key is padding, so that it adds to no sum."""
    wide = phi(_wide(k))
    return wide if padding is None else hide(wide, padding)


def query_features(q: Tensor) -> Tensor:
    """φ(q) (B, H, T, D) in float32 or wider, each query's divided by its largest if that is below 1.

    The factor cancels in numerator / denominator, and no query is lost: in float32, e^-104 would be 0.

    >>> query_features(torch.tensor([[-200.0, -201.0], [-1.0, 2.0]]))
    tensor([[1.0000, 0.3679],
            [0.3679, 3.0000]])
    """
    wide = _wide(q)
    largest = wide.detach().amax(-1, keepdim=True).clamp(torch.finfo(wide.dtype).min, 0)
    return phi(torch.where(wide > 0, wide, wide - largest))


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def hide(x: Tensor, padding: Tensor) -> Tensor:
    """x (B, G, S, d) with 0 for padded keys, NaN included."""
    return x.masked_fill(~padding.to(x.device, torch.bool)[:, None, :, None], 0)


class LinearState:
    """What linear attention keeps of the tokens so far: Σ φ(k) [v, 1]ᵀ a head, of one size however many they are.

    Pass the same state to every call: a call reads it and adds its own tokens. Gradients flow through it, and the graph
    grows with every token: generate under torch.no_grad(), and train on pieces of a text with `state = state.detach()`
    between them. `copy.deepcopy` makes a second one that goes on by itself, with the same graph.

    >>> LinearState()
    LinearState(0 tokens)
    """

    def __init__(self) -> None:
        self.reset()

    @property
    def nbytes(self) -> int:
        """Bytes held: B · G · D · (Dv + 1) numbers."""
        return 0 if self.sums is None else self.sums.nbytes

    def reset(self) -> None:
        """Forget every token."""
        self.sums: Tensor | None = None  # (B, G, D, Dv + 1)
        self.tokens = 0
        self.keys: int | Tensor = 0  # how many of the tokens were real, (B,) where there was padding

    def detach(self) -> LinearState:
        """A state of the same tokens without their graph."""
        return self._with(None if self.sums is None else self.sums.detach())

    def __deepcopy__(self, memo: dict[int, object]) -> LinearState:
        return self._with(None if self.sums is None else self.sums.clone())  # PyTorch copies no tensor inside a graph

    def _with(self, sums: Tensor | None) -> LinearState:
        other = copy.copy(self)
        other.sums = sums
        return other

    def __repr__(self) -> str:
        return f"LinearState({self.tokens} tokens" + (f" in {size(self.nbytes)})" if self.tokens else ")")


def attention(
    q: Tensor,  # (B, H, T, D), φ of the queries, each times any number
    k: Tensor,  # (B, G, S, D), φ of the keys
    v: Tensor,  # (B, G, S, Dv)
    sums: Tensor | None = None,  # (B, G, D, Dv + 1), of what was before
    *,
    is_causal: bool = False,
    chunk: int = 128,
) -> tuple[Tensor, Tensor, Tensor]:  # numerator (B, H, T, Dv), denominator (B, H, T, 1), sums
    """Numerator and denominator of every query, and the sums after the last key."""
    with no_autocast(q.device):  # sums over a long text, in half precision, stop growing
        return _attention(q, k, v, sums, is_causal, chunk)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, sums: Tensor | None, is_causal: bool, chunk: int
) -> tuple[Tensor, Tensor, Tensor]:
    v = F.pad(v, (0, 1), value=1.0)
    if sums is None:
        sums = k.new_zeros(*k.shape[:2], k.shape[-1], v.shape[-1])
    if not is_causal:
        sums = sums + k.mT @ v
        out = grouped_matmul(q, sums)
        return out[..., :-1], out[..., -1:], sums
    parts = [q.new_zeros(*q.shape[:2], 0, v.shape[-1])]
    for part in split(slice(0, q.shape[2]), chunk):
        some_q, some_k, some_v = q[:, :, part], k[:, :, part], v[:, :, part]
        inside = grouped_matmul(some_q, some_k.mT).tril()
        parts.append(grouped_matmul(inside, some_v) + grouped_matmul(some_q, sums))
        sums = sums + some_k.mT @ some_v
    out = torch.cat(parts, 2)
    return out[..., :-1], out[..., -1:], sums


def running_sums(x: Tensor) -> Tensor:
    """Σ_{s <= t} x_s of x (…, S, D), each in log₂ S additions, whose rounding does not grow with S as cumsum's does.

    >>> running_sums(torch.tensor([[1.0], [2.0], [3.0]])).mT
    tensor([[1., 3., 6.]])
    """
    step = 1
    while step < x.shape[-2]:
        x = torch.cat([x[..., :step, :], x[..., step:, :] + x[..., :-step, :]], -2)
        step *= 2
    return x


def divide(numerator: Tensor, denominator: Tensor) -> Tensor:
    """0 where the denominator is: a query that sees nothing."""
    return numerator / denominator.masked_fill(denominator == 0, 1)
