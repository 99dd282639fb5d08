"""Each check refuses what people typically write wrong, in words of the idea, and takes right answers of any making."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead.learn.exercise import Exercise, Wrong
from clearhead.learn.exercises import NAMES, exercises_of

EXERCISES: dict[str, Exercise] = {e.name: e for lesson in NAMES for e in exercises_of(lesson)}
Right = dict[str, Any]  # what is special about it -> the answer, or a layer's forward
Wrongs = dict[str, tuple[str, Any]]  # what is wrong with it -> words of the message, and the answer
RIGHT: dict[str, Right] = {}
WRONG: dict[str, Wrongs] = {}


def softmax(scores: Tensor, dim: int = -1) -> Tensor:
    return torch.softmax(scores, dim)


def weights(q: Tensor, k: Tensor, factor: float | None = None, dim: int = -1) -> Tensor:
    return softmax(q @ k.mT * (q.shape[-1] ** -0.5 if factor is None else factor), dim)


def later(T: int, first: int = 1) -> Tensor:
    return torch.ones(T, T, dtype=torch.bool).triu(first)


def hide(scores: Tensor, hidden: Tensor | None = None, low: float = -math.inf) -> Tensor:
    return scores.masked_fill(later(scores.shape[-1]) if hidden is None else hidden, low)


def normalised(e: Tensor) -> Tensor:
    return e / e.sum(-1, keepdim=True)


# --- lesson 1 ------------------------------------------------------------------------------------------------------


def halves(states: Tensor) -> tuple[Tensor, Tensor]:
    return states.chunk(2, dim=1)


RIGHT["sentence_vector"] = {
    "stacked": lambda states: torch.hstack([states[len(states) - 1].chunk(2)[0], states[0].chunk(2)[1]]),
    "rolled": lambda states: torch.cat([halves(states)[0].flip(0), halves(states)[1]], dim=1)[0],
}
WRONG["sentence_vector"] = {
    "last row": ("last row whole", lambda states: states[-1]),
    "first row": ("first row whole", lambda states: states[0]),
    "where they begin": ("where its reader begins", lambda s: torch.cat([halves(s)[0][0], halves(s)[1][-1]])),
    "the other first": ("wrong order", lambda states: torch.cat([halves(states)[1][0], halves(states)[0][-1]])),
    "average": ("the average", lambda states: states.mean(dim=0)),
    "one reader": ("The shape is", lambda states: halves(states)[0][-1]),
}

RIGHT["additive_scores"] = {
    "word by word": lambda s, h, W, U, v: torch.stack([torch.dot(v, torch.tanh(W.T @ s + U.T @ word)) for word in h]),
    "summed": lambda s, h, W, U, v: (v * torch.tanh(h @ U + s @ W)).sum(dim=-1),
}
WRONG["additive_scores"] = {
    "no tanh": ("The tanh is missing", lambda s, h, W, U, v: (s @ W + h @ U) @ v),
    "tanh last": ("tanh came last", lambda s, h, W, U, v: torch.tanh((s @ W + h @ U) @ v)),
    "no v": ("only added up", lambda s, h, W, U, v: torch.tanh(s @ W + h @ U).sum(dim=-1)),
    "product": ("are multiplied", lambda s, h, W, U, v: torch.tanh((s @ W) * (h @ U)) @ v),
    "no state": ("decoder's state is missing", lambda s, h, W, U, v: torch.tanh(h @ U) @ v),
    "no words": ("words are missing", lambda s, h, W, U, v: (torch.tanh(s @ W) @ v).expand(len(h))),
    "softmax": ("shares already", lambda s, h, W, U, v: softmax(torch.tanh(s @ W + h @ U) @ v)),
    "sigmoid": ("in place of tanh", lambda s, h, W, U, v: torch.sigmoid(s @ W + h @ U) @ v),
}


def additive(self: Any, query: Tensor, keys: Tensor, between: Any = torch.tanh) -> Tensor:
    """The scores (T, S)."""
    return self.score(between(self.W_query(query)[:, None] + self.W_key(keys))).squeeze(-1)


def state_by_state(self: Any, query: Tensor, keys: Tensor) -> Tensor:
    rows = [torch.tanh(self.W_query(s) + self.W_key(keys)) @ self.score.weight[0] for s in query]
    return torch.stack([softmax(row) @ keys for row in rows])


RIGHT["AdditiveAttention"] = {
    "state by state": state_by_state,
    "einsum": lambda self, q, k: torch.einsum("ts,sd->td", F.softmax(additive(self, q, k), dim=1), k),
}
WRONG["AdditiveAttention"] = {
    "only weights": ("now take it", lambda self, q, k: softmax(additive(self, q, k))),
    "projected": ("projected keys are mixed", lambda self, q, k: softmax(additive(self, q, k)) @ self.W_key(k)),
    "over states": ("Each column adds up to 1", lambda self, q, k: softmax(additive(self, q, k), 0) @ k),
    "over all": (
        "All weights together",
        lambda self, q, k: softmax(additive(self, q, k).flatten()).view(len(q), -1) @ k,
    ),
    "no softmax": ("still scores", lambda self, q, k: additive(self, q, k) @ k),
    "no tanh": ("The tanh is missing", lambda self, q, k: softmax(additive(self, q, k, lambda both: both)) @ k),
    "no v": (
        "only added up",
        lambda self, q, k: softmax(torch.tanh(self.W_query(q)[:, None] + self.W_key(k)).sum(dim=-1)) @ k,
    ),
    "the best": ("Only the best word", lambda self, q, k: k[additive(self, q, k).argmax(dim=-1)]),
    "all alike": ("same share", lambda self, q, k: k.mean(dim=0).expand(len(q), -1)),
}

# --- lesson 2 ------------------------------------------------------------------------------------------------------


def dots_by_loops(x: Tensor) -> Tensor:
    return torch.tensor([[sum(float(a) * float(b) for a, b in zip(q, k, strict=True)) for k in x] for q in x])


RIGHT["dot_scores"] = {
    "loops": dots_by_loops,
    "einsum": lambda x: torch.einsum("td,sd->ts", x, x),
    "multiplied and summed": lambda x: (x[:, None] * x[None]).sum(-1),
}
WRONG["dot_scores"] = {
    "of columns": ("compares the columns", lambda x: x.T @ x),
    "with a softmax": ("weights already", lambda x: softmax(x @ x.T)),
    "scaled": ("Not yet", lambda x: x @ x.T / x.shape[1] ** 0.5),
    "of unit vectors": ("cosine", lambda x: F.normalize(x, dim=1) @ F.normalize(x, dim=1).T),
    "distances": ("distances", lambda x: torch.cdist(x, x)),
    "of earlier words": ("Only one triangle", lambda x: (x @ x.T).tril()),
    "of others only": ("itself as well", lambda x: (x @ x.T) * (1 - torch.eye(len(x)))),
    "twice as much": ("the numbers are not", lambda x: 2 * x @ x.T),
    "of one word": ("The shape is", lambda x: x @ x[1]),
}

RIGHT["softmax"] = {
    "PyTorch's": lambda scores: F.softmax(scores, dim=1),
    "row by row": lambda scores: torch.stack([(r - r.max()).exp() / (r - r.max()).exp().sum() for r in scores]),
    "logsumexp": lambda scores: torch.exp(scores - torch.logsumexp(scores, dim=-1, keepdim=True)),
}
WRONG["softmax"] = {
    "over columns": ("Each column adds up to 1", lambda scores: softmax(scores, 0)),
    "over everything": ("All weights together", lambda scores: scores.exp() / scores.exp().sum()),
    "without exp": ("negative shares", normalised),
    "without a sum": ("Divide each row by its sum", torch.exp),
    "logarithms": ("logarithms", lambda scores: torch.log_softmax(scores, -1)),
    "sums lined up with columns": (
        "keepdim=True",
        lambda s: s.exp() / s.exp().sum(-1) if s.shape[0] == s.shape[1] else softmax(s),
    ),
    "overflow": ("Large scores give NaN", lambda scores: normalised(scores.exp())),
    "less the largest of all": ("not of the whole tensor", lambda s: normalised((s - s.max()).exp())),
    "by another sum": ("adds up to", lambda scores: 2**scores / scores.exp().sum(-1, keepdim=True)),
}


def mixed_by_loops(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for t in range(len(x)):
        shares = softmax(torch.stack([torch.dot(x[t], other) for other in x]))
        for s in range(len(x)):
            out[t] += shares[s] * x[s]
    return out


RIGHT["context_vectors"] = {
    "loops": mixed_by_loops,
    "fused": lambda x: F.scaled_dot_product_attention(x, x, x, scale=1.0),
    "transposed as a whole": lambda x: (x.T @ softmax(x @ x.T, 0)).T,
}
WRONG["context_vectors"] = {
    "only weights": ("now take it", lambda x: weights(x, x, 1)),
    "weights turned": ("wrong way round", lambda x: weights(x, x, 1).T @ x),
    "scaled": ("Not yet", lambda x: weights(x, x) @ x),
    "mixed by scores": ("These are still scores", lambda x: x @ x.T @ x),
    "of all alike": ("the same share", lambda x: x.mean(0).expand(len(x), -1)),
    "softmax over all": ("All weights together", lambda x: softmax((x @ x.T).flatten()).view(len(x), -1) @ x),
}

# --- lesson 3 ------------------------------------------------------------------------------------------------------

RIGHT["scaled_weights"] = {
    "scaled before the product": lambda q, k: F.softmax((q / q.shape[1] ** 0.5) @ k.T, dim=1),
    "einsum": lambda q, k: normalised((torch.einsum("id,jd->ij", q, k) * k.size(-1) ** -0.5).exp()),
    "fused": lambda q, k: F.scaled_dot_product_attention(q, k, torch.eye(len(k))),
}
WRONG["scaled_weights"] = {
    "no scale": ("are not scaled", lambda q, k: weights(q, k, 1)),
    "scale inverted": ("multiplied by √d_k", lambda q, k: weights(q, k, q.shape[-1] ** 0.5)),
    "by d_k": ("divided by d_k", lambda q, k: weights(q, k, 1 / q.shape[-1])),
    "by the number of keys": ("another width", lambda q, k: weights(q, k, len(k) ** -0.5)),
    "a width typed in": ("Take d_k from the input", lambda q, k: weights(q, k, 11**-0.5)),
    "scaled too late": ("after the softmax", lambda q, k: weights(q, k, 1) / q.shape[-1] ** 0.5),
    "softmax over queries": ("Each column adds up to 1", lambda q, k: weights(q, k, dim=0)),
    "softmax over all": (
        "All weights together",
        lambda q, k: softmax((q @ k.T / q.shape[-1] ** 0.5).flatten()).view(len(q), -1),
    ),
    "columns, and scale inverted": ("Each column adds up to 1", lambda q, k: weights(q, k, q.shape[-1] ** 0.5, dim=0)),
    "columns, and a width typed in": ("Each column adds up to 1", lambda q, k: weights(q, k, 11**-0.5, dim=0)),
    "keys that ask": ("roles are swapped", lambda q, k: weights(k, q)),
    "only scores": ("still scores", lambda q, k: q @ k.T / q.shape[-1] ** 0.5),
}


def attention_by_loops(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    shares, out = torch.zeros(len(q), len(k)), torch.zeros(len(q), v.shape[1])
    for t in range(len(q)):
        for s in range(len(k)):
            shares[t, s] = math.exp(float(q[t] @ k[s]) / math.sqrt(q.shape[1]))
        shares[t] /= shares[t].sum()
        for s in range(len(k)):
            out[t] += shares[t, s] * v[s]
    return out, shares


RIGHT["attention"] = {
    "loops": attention_by_loops,
    "a batch of one": lambda q, k, v: ((weights(q[None], k[None]) @ v[None])[0], weights(q[None], k[None])[0]),
}
WRONG["attention"] = {
    "the output alone": ("Give back two things", lambda q, k, v: weights(q, k) @ v),
    "in the wrong order": ("wrong order", lambda q, k, v: (weights(q, k), weights(q, k) @ v)),
    "weights twice": ("now take it", lambda q, k, v: (weights(q, k), weights(q, k))),
    "keys mixed": ("The keys are mixed", lambda q, k, v: (weights(q, k) @ k, weights(q, k))),
    "weights turned": ("applied the wrong way round", lambda q, k, v: (weights(q, k).T @ v, weights(q, k))),
    "scale inverted": ("multiplied by √d_k", lambda q, k, v: ((w := weights(q, k, q.shape[-1] ** 0.5)) @ v, w)),
    "of all alike": ("the same share", lambda q, k, v: (v.mean(0).expand(len(q), -1) + 0 * q[:, :1], weights(q, k))),
}


def projected(layer: Any, x: Tensor) -> list[Tensor]:
    return [layer.W_query(x), layer.W_key(x), layer.W_value(x)]


def one_head(layer: Any, x: Tensor, factor: float | None = None, dim: int = -1) -> Tensor:
    q, k, v = projected(layer, x)
    return weights(q, k, factor, dim) @ v


def without_gradient(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        return one_head(self, x)


class WithBias(nn.Module):
    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__()
        self.W_query, self.W_key, self.W_value = nn.Linear(d_in, d_out), nn.Linear(d_in, d_out), nn.Linear(d_in, d_out)

    forward = one_head


class WithSizesTurned(WithBias):
    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__(d_out, d_in)


class NoModule:
    def __init__(self, d_in: int, d_out: int) -> None:
        self.W_query = nn.Linear(d_in, d_out)


RIGHT["SelfAttention"] = {
    "fused": lambda self, x: F.scaled_dot_product_attention(*projected(self, x)),
    "matrices": lambda self, x: weights(x @ self.W_query.weight.T, x @ self.W_key.weight.T) @ self.W_value(x),
    "with a bias": WithBias,
}
WRONG["SelfAttention"] = {
    "no scale": ("are not scaled", lambda self, x: one_head(self, x, 1)),
    "by the width of the input": ("another width", lambda self, x: one_head(self, x, x.shape[-1] ** -0.5)),
    "scale inverted": ("multiplied by √d_k", lambda self, x: one_head(self, x, self.W_key.out_features**0.5)),
    "softmax over queries": ("Each column adds up to 1", lambda self, x: one_head(self, x, dim=0)),
    "only weights": ("now take it", lambda self, x: weights(self.W_query(x), self.W_key(x))),
    "input mixed": ("words themselves are mixed", lambda self, x: weights(self.W_query(x), self.W_key(x)) @ x),
    "queries as keys": ("both from one", lambda self, x: weights(self.W_query(x), self.W_query(x)) @ self.W_value(x)),
    "not projected": ("projections are missing", lambda self, x: weights(x, x) @ self.W_value(x)),
    "nothing projected": ("projections are missing", lambda self, x: weights(x, x) @ x),
    "keys that ask": ("W_query makes q", lambda self, x: weights(self.W_key(x), self.W_query(x)) @ self.W_value(x)),
    "detached weights": (
        "No gradient reaches W_query",
        lambda self, x: weights(self.W_query(x), self.W_key(x)).detach() @ self.W_value(x),
    ),
    "no gradient": ("No gradient reaches W_query", without_gradient),
    "sizes turned": ("needs W_query = nn.Linear", WithSizesTurned),
    "no module": ("no nn.Module", NoModule),
}

# --- lesson 4 ------------------------------------------------------------------------------------------------------


def row_by_row(scores: Tensor) -> Tensor:
    out = torch.zeros_like(scores)
    for t in range(len(scores)):
        out[t, : t + 1] = softmax(scores[t, : t + 1])
    return out


RIGHT["causal_weights"] = {
    "a mask that is added": lambda scores: softmax(scores + torch.full_like(scores, -math.inf).triu(1)),
    "rows cut off": row_by_row,
    "a very low number": lambda s: softmax(torch.where(torch.ones_like(s).tril() == 0, -1e9, s)),
}
WRONG["causal_weights"] = {
    "no mask": ("what comes after them", softmax),
    "mask turned": ("shows the future", lambda scores: softmax(hide(scores, later(len(scores)).T))),
    "diagonal hidden": ("No word sees itself", lambda scores: softmax(hide(scores, later(len(scores), 0)))),
    "one ahead": ("just the word to be guessed", lambda scores: softmax(hide(scores, later(len(scores), 2)))),
    "zeroed after": ("its share is lost", lambda scores: softmax(scores).tril()),
    "zeroed after, renormalised": ("Right for small scores", lambda scores: normalised(softmax(scores).tril())),
    "scores set to 0": ("0 is an ordinary score", lambda scores: softmax(scores.tril())),
    "scores set to -100": ("not low enough", lambda scores: softmax(hide(scores, low=-100.0))),
    "infinity times 0": ("multiplied by 0", lambda scores: softmax(scores + later(len(scores)) * -math.inf)),
    "softmax over queries": ("Each column adds up to 1", lambda scores: softmax(hide(scores), 0)),
    "in place": ("in place", lambda scores: softmax(scores.masked_fill_(later(len(scores)), -math.inf))),
    "a little future": ("what comes after them", lambda s: 0.9 * softmax(hide(s)) + 0.1 / len(s)),
    "not normalised": ("each row must add up to 1", lambda scores: hide(scores).exp()),
}


def kept(w: Tensor, p: float, *size: int) -> Tensor:
    return torch.rand(size or w.shape) >= p


RIGHT["drop_weights"] = {
    "PyTorch's": F.dropout,
    "Bernoulli": lambda w, p, training: w * torch.bernoulli(torch.full_like(w, 1 - p)) / (1 - p) if training else w,
}
WRONG["drop_weights"] = {
    "always": ("dropped outside training", lambda w, p, training: F.dropout(w, p)),
    "scaled outside": ("come back scaled", lambda w, p, training: w * kept(w, p) if training else w * (1 - p)),
    "not scaled": ("not scaled up", lambda w, p, training: w * kept(w, p) if training else w),
    "divided by p": ("divided by p", lambda w, p, training: w * kept(w, p) / p if training else w),
    "keeps p": ("share p is kept", lambda w, p, training: w * ~kept(w, p) / p if training else w),
    "renormalised": ("exactly 1", lambda w, p, training: normalised(w * kept(w, p)) if training else w),
    "rows": ("Whole rows", lambda w, p, training: w * kept(w, p, len(w), 1) / (1 - p) if training else w),
    "columns": (
        "Whole rows or columns",
        lambda w, p, training: w * kept(w, p, w.shape[1]) / (1 - p) if training else w,
    ),
    "never": ("Nothing is dropped", lambda w, p, training: w),
    "a fixed seed": (
        "draws anew",
        lambda w, p, training: (
            w * (torch.rand(w.shape, generator=torch.Generator().manual_seed(0)) >= p) / (1 - p) if training else w
        ),
    ),
    "a factor typed in": ("multiplied by 2.000", lambda w, p, training: w * kept(w, p) * 2 if training else w),
    "a share typed in": ("is dropped, with p", lambda w, p, training: F.dropout(w, 0.5, training)),
}


def causal(
    self: Any,
    x: Tensor,
    hidden: Tensor | None = None,
    factor: float | None = None,
    dim: int = -1,
    drop: Any = F.dropout,
) -> Tensor:
    q, k, v = projected(self, x)
    scores = q @ k.mT * (k.shape[-1] ** -0.5 if factor is None else factor)
    return drop(softmax(hide(scores, hidden), dim), self.dropout, self.training) @ v


def undropped(w: Tensor, p: float, training: bool) -> Tensor:
    return w


def drops_scores(self: Any, x: Tensor) -> Tensor:
    q, k, v = projected(self, x)
    return softmax(hide(F.dropout(q @ k.mT / k.shape[-1] ** 0.5, self.dropout, self.training))) @ v


class WithDropoutLayer(EXERCISES["CausalAttention"].solution):  # type: ignore[misc]
    def __init__(self, d_in: int, d_out: int, dropout: float) -> None:
        super().__init__(d_in, d_out, dropout)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.einsum("btd,bsd->bts", self.W_query(x), self.W_key(x)) / self.W_key.out_features**0.5
        mask = torch.tril(torch.ones(x.shape[1], x.shape[1]))
        return self.drop(torch.softmax(scores.masked_fill(mask == 0, float("-inf")), dim=-1)) @ self.W_value(x)


RIGHT["CausalAttention"] = {
    "fused": lambda self, x: F.scaled_dot_product_attention(
        *projected(self, x), dropout_p=self.dropout * self.training, is_causal=True
    ),
    "text by text": lambda self, x: torch.stack([causal(self, text) for text in x]),
    "a dropout layer": WithDropoutLayer,
}
WRONG["CausalAttention"] = {
    "dropout in evaluation": (
        "outside training",
        lambda self, x: causal(self, x, drop=lambda w, p, _: F.dropout(w, p)),
    ),
    "no dropout": ("Nothing is dropped", lambda self, x: causal(self, x, drop=undropped)),
    "dropout not scaled": (
        "not scaled up",
        lambda self, x: causal(self, x, drop=lambda w, p, training: w * kept(w, p) if training else w),
    ),
    "output dropped": (
        "Something other than the weights",
        lambda self, x: F.dropout(causal(self, x, drop=undropped), self.dropout, self.training),
    ),
    "input dropped": (
        "Something other than the weights",
        lambda self, x: causal(self, F.dropout(x, self.dropout, self.training), drop=undropped),
    ),
    "scores dropped": ("exactly 1", drops_scores),
    "looks ahead": ("what comes after them", lambda self, x: causal(self, x, torch.tensor(False))),
    "looks ahead, no scale": ("what comes after them", lambda self, x: causal(self, x, torch.tensor(False), 1)),
    "mask turned": ("shows the future", lambda self, x: causal(self, x, later(x.shape[1]).T)),
    "diagonal hidden": ("No word sees itself", lambda self, x: causal(self, x, later(x.shape[1], 0))),
    "one ahead": ("just the word to be guessed", lambda self, x: causal(self, x, later(x.shape[1], 2))),
    "no scale": ("are not scaled", lambda self, x: causal(self, x, factor=1)),
    "by the width of the input": ("another width", lambda self, x: causal(self, x, factor=x.shape[-1] ** -0.5)),
    "softmax over queries": ("Each column adds up to 1", lambda self, x: causal(self, x, dim=1)),
    "softmax over texts": ("dimension 0 is the texts", lambda self, x: causal(self, x, dim=0)),
    "softmax over texts, no NaN": ("Texts of the batch", lambda self, x: causal(self, x, dim=0).nan_to_num(0.0)),
    "keys that ask": (
        "W_query makes q",
        lambda self, x: F.scaled_dot_product_attention(self.W_key(x), self.W_query(x), self.W_value(x), is_causal=True),
    ),
    "nothing projected": (
        "projections are missing",
        lambda self, x: F.scaled_dot_product_attention(x, x, x, is_causal=True),
    ),
    "keys mixed": (
        "keys are mixed",
        lambda self, x: F.scaled_dot_product_attention(self.W_query(x), *[self.W_key(x)] * 2, is_causal=True),
    ),
}

# --- lesson 5 ------------------------------------------------------------------------------------------------------


def split(x: Tensor, H: int) -> Tensor:
    return x.view(*x.shape[:2], H, -1).transpose(1, 2)


def by_slices(x: Tensor, num_heads: int) -> Tensor:
    D = x.shape[-1] // num_heads
    return torch.stack([x[..., h * D : (h + 1) * D] for h in range(num_heads)], dim=1)


RIGHT["split_heads"] = {
    "slices": by_slices,
    "permute": lambda x, H: x.reshape(*x.shape[:2], H, -1).permute(0, 2, 1, 3).contiguous(),
}
WRONG["split_heads"] = {
    "view alone": ("The heads are mixed", lambda x, H: x.view(len(x), H, x.shape[1], -1)),
    "no transpose": ("heads come after words", lambda x, H: x.view(*x.shape[:2], H, -1)),
    "every H-th": ("every H-th number", lambda x, H: x.view(*x.shape[:2], -1, H).permute(0, 3, 1, 2)),
    "chunks as a batch": ("The shape is", lambda x, H: torch.cat(x.chunk(H, dim=-1))),
}

RIGHT["merge_heads"] = {
    "cat": lambda x: torch.cat(list(x.unbind(1)), dim=-1),
    "flatten": lambda x: x.permute(0, 2, 1, 3).flatten(2),
}
WRONG["merge_heads"] = {
    "no transpose": ("Turn back first", lambda x: x.reshape(x.shape[0], x.shape[2], -1)),
    "alternating": ("alternate within a word", lambda x: x.permute(0, 2, 3, 1).flatten(2)),
    "half way": ("heads come after words", lambda x: x.transpose(1, 2)),
}


def heads(self: Any, x: Tensor, cut: Any = split, causal: bool = True, scale: float | None = None) -> Tensor:
    """(B, H, T, D), by a way of cutting q, k and v into heads."""
    q, k, v = (cut(whole, self.num_heads) for whole in projected(self, x))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)


def merged(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def unturned(x: Tensor) -> Tensor:
    return x.reshape(x.shape[0], x.shape[2], -1)


def by_view(x: Tensor, H: int) -> Tensor:
    return x.view(len(x), H, x.shape[1], -1)


def every_hth(x: Tensor, H: int) -> Tensor:
    return x.view(*x.shape[:2], -1, H).permute(0, 3, 1, 2)


def head_by_head(self: Any, x: Tensor) -> Tensor:
    pieces = zip(*(whole.chunk(self.num_heads, dim=-1) for whole in projected(self, x)), strict=True)
    return self.out_proj(torch.cat([softmax(hide(q @ k.mT / q.shape[-1] ** 0.5)) @ v for q, k, v in pieces], dim=-1))


def sum_over_heads(self: Any, x: Tensor) -> Tensor:
    W_out = self.out_proj.weight.view(-1, self.num_heads, self.out_proj.in_features // self.num_heads)  # (d_out, H, D)
    return torch.einsum("bhtd,ohd->bto", heads(self, x), W_out) + self.out_proj.bias


def competing(self: Any, x: Tensor, dim: int, nan: float = math.nan) -> Tensor:
    q, k, v = (split(whole, self.num_heads) for whole in projected(self, x))
    return self.out_proj(merged(softmax(hide(q @ k.mT / q.shape[-1] ** 0.5), dim).nan_to_num(nan) @ v))


def keys_that_ask(self: Any, x: Tensor) -> Tensor:
    q, k, v = (split(whole, self.num_heads) for whole in projected(self, x))
    return self.out_proj(merged(F.scaled_dot_product_attention(k, q, v, is_causal=True)))


RIGHT["MultiHeadAttention"] = {
    "fused": lambda self, x: self.out_proj(merged(heads(self, x))),
    "head by head": head_by_head,
    "a sum over heads": sum_over_heads,
}
WRONG["MultiHeadAttention"] = {
    "no out_proj": ("W_O is missing", lambda self, x: merged(heads(self, x))),
    "no bias": ("has a bias as well", lambda self, x: merged(heads(self, x)) @ self.out_proj.weight.T),
    "view alone": ("The heads are mixed", lambda self, x: self.out_proj(unturned(heads(self, x, by_view)))),
    "view, then merged": ("The heads are mixed", lambda self, x: self.out_proj(merged(heads(self, x, by_view)))),
    "view alone, looks ahead": (
        "The heads are mixed",
        lambda self, x: self.out_proj(unturned(heads(self, x, by_view, causal=False))),
    ),
    "not turned back, looks ahead": (
        "Turn back first",
        lambda self, x: self.out_proj(unturned(heads(self, x, causal=False))),
    ),
    "not turned back": ("Turn back first", lambda self, x: self.out_proj(unturned(heads(self, x)))),
    "not turned back, no out_proj": ("W_O is missing", lambda self, x: unturned(heads(self, x))),
    "every H-th": ("every H-th number", lambda self, x: self.out_proj(merged(heads(self, x, every_hth)))),
    "one head": ("one wide head", lambda self, x: self.out_proj(heads(self, x, lambda whole, H: whole))),
    "by the whole width": (
        "another width",
        lambda self, x: self.out_proj(merged(heads(self, x, scale=self.out_proj.in_features**-0.5))),
    ),
    "no scale": ("are not scaled", lambda self, x: self.out_proj(merged(heads(self, x, scale=1.0)))),
    "looks ahead": ("what comes after them", lambda self, x: self.out_proj(merged(heads(self, x, causal=False)))),
    "softmax over texts": ("dimension 0, the texts", lambda self, x: competing(self, x, 0)),
    "softmax over heads": ("dimension 1, the heads", lambda self, x: competing(self, x, 1)),
    "softmax over heads, no NaN": ("dimension 1, the heads", lambda self, x: competing(self, x, 1, nan=0.0)),
    "softmax over queries": ("Each column adds up to 1", lambda self, x: competing(self, x, 2)),
    "keys that ask": ("W_query makes q", keys_that_ask),
}

# --- lesson 6 ------------------------------------------------------------------------------------------------------


def crossed(
    x: Tensor, c: Tensor, W_query: Tensor, W_key: Tensor, W_value: Tensor, factor: float | None = None
) -> Tensor:
    return weights(x @ W_query, c @ W_key, factor) @ (c @ W_value)


def where_it_fits(wrong: Any) -> Any:
    """The wrong answer where both texts are alike in size, else the right one."""
    return lambda x, c, *W: wrong(x, c, *W) if x.shape == c.shape else crossed(x, c, *W)


RIGHT["cross_attention"] = {
    "fused": lambda x, c, A, B, C: F.scaled_dot_product_attention((x @ A)[None], (c @ B)[None], (c @ C)[None])[0],
    "word by word": lambda x, c, A, B, C: torch.stack([weights((w @ A)[None], c @ B)[0] @ (c @ C) for w in x]),
}
WRONG["cross_attention"] = {
    "no scale": ("are not scaled", lambda x, c, A, B, C: crossed(x, c, A, B, C, 1.0)),
    "by the width of x": ("another width", lambda x, c, A, B, C: crossed(x, c, A, B, C, x.shape[1] ** -0.5)),
    "only weights": ("now take it", lambda x, c, A, B, C: weights(x @ A, c @ B)),
    "over x": ("Each column adds up to 1", lambda x, c, A, B, C: weights(x @ A, c @ B, dim=0) @ (c @ C)),
    "keys of x": ("The keys come from x", where_it_fits(lambda x, c, A, B, C: weights(x @ A, x @ B) @ (c @ C))),
    "all of x": ("The keys come from x", where_it_fits(lambda x, c, A, B, C: weights(x @ A, x @ B) @ (x @ C))),
    "values of x": ("The values come from x", where_it_fits(lambda x, c, A, B, C: weights(x @ A, c @ B) @ (x @ C))),
    "the context asks": ("The roles are swapped", where_it_fits(lambda x, c, A, B, C: crossed(c, x, A, B, C))),
    "keys ask": ("The roles are swapped", where_it_fits(lambda x, c, A, B, C: weights(c @ B, x @ A) @ (c @ C))),
    "causal": (
        "no mask",
        where_it_fits(lambda x, c, A, B, C: softmax(hide((x @ A) @ (c @ B).T / A.shape[1] ** 0.5)) @ (c @ C)),
    ),
    "keys mixed": ("The keys are mixed", where_it_fits(lambda x, c, A, B, C: weights(x @ A, c @ B) @ (c @ B))),
}


def square_only(wrong: Any) -> Any:
    return lambda s, real: wrong(s, real) if s.shape[1] == s.shape[2] else softmax(hide(s, ~real[:, None]))


RIGHT["padded_weights"] = {
    "added": lambda s, real: softmax(s + torch.zeros(real.shape).masked_fill(~real, -math.inf)[:, None]),
    "renormalised": lambda s, real: normalised(s.exp() * real[:, None]),
    "text by text": lambda s, real: torch.stack([softmax(hide(one, ~ok)) for one, ok in zip(s, real, strict=True)]),
}
WRONG["padded_weights"] = {
    "no mask": ("Padding gets weight", lambda s, real: softmax(s)),
    "set to 0": ("Padding gets weight", lambda s, real: softmax(s.masked_fill(~real[:, None], 0.0))),
    "turned": ("wrong way round", lambda s, real: softmax(hide(s, real[:, None]))),
    "zeroed after": ("its share is lost", lambda s, real: softmax(s) * real[:, None]),
    "of all texts": ("padding of its own", lambda s, real: softmax(hide(s, ~real.all(0)))),
    "queries": ("Whole rows", square_only(lambda s, real: softmax(hide(s, ~real[:, :, None])))),
    "over queries": ("Each column adds up to 1", lambda s, real: softmax(hide(s, ~real[:, None]), 1)),
    "scores": ("still scores", lambda s, real: hide(s, ~real[:, None], 0.0)),
}

RIGHT["alignment_share"] = {
    "looped": lambda w, gold: torch.stack(
        [row[line].sum() for row, line in zip(w, gold, strict=True) if line.any()]
    ).mean(),
    "divided": lambda w, gold: w[gold].sum() / gold.any(dim=1).sum(),
}
WRONG["alignment_share"] = {
    "all rows": ("without a line", lambda w, gold: (w * gold).sum(dim=1).mean()),
    "lines": ("average weight on a line", lambda w, gold: w[gold].mean()),
    "summed": ("added up", lambda w, gold: (w * gold).sum()),
    "rows": ("one number", lambda w, gold: (w * gold).sum(dim=1)),
    "hits": ("largest weight", lambda w, gold: gold[torch.arange(len(w)), w.argmax(1)].float().mean()),
    "columns": ("along it", lambda w, gold: (w * gold).sum(dim=0).mean()),
}

# --- lesson 7 ------------------------------------------------------------------------------------------------------


def back(n: int) -> Tensor:
    return torch.arange(n)[:, None] - torch.arange(n)


def windowed(low: int, high: int) -> Any:
    """What sees the keys that lie low up to window + high back."""
    return lambda s, window: softmax(hide(s, (back(len(s)) < low) | (back(len(s)) >= window + high)))


RIGHT["window_weights"] = {
    "a band": lambda s, window: softmax(s.masked_fill(torch.ones_like(s).tril().triu(1 - window) == 0, -math.inf)),
    "row by row": lambda s, window: torch.stack(
        [
            F.pad(softmax(row[max(0, t - window + 1) : t + 1]), (max(0, t - window + 1), len(s) - t - 1))
            for t, row in enumerate(s)
        ]
    ),
}
WRONG["window_weights"] = {
    "one more": ("one more than it may", windowed(0, 1)),
    "one less": ("one less than it may", windowed(0, -1)),
    "no window": ("All that came before", windowed(0, 99)),
    "ahead": ("reaches ahead", windowed(-99, 0)),
    "both sides": ("reaches ahead", lambda s, window: softmax(hide(s, back(len(s)).abs() >= window))),
    "not itself": ("leaves out the word itself", windowed(1, 0)),
    "chunks": (
        "cut into chunks",
        lambda s, window: softmax(
            hide(s, (back(len(s)) < 0) | (torch.arange(len(s))[:, None] // window != torch.arange(len(s)) // window))
        ),
    ),
    "zeroed after": ("its share is lost", lambda s, window: softmax(s).tril().triu(1 - window)),
    "set to 0": ("0 is an ordinary score", lambda s, window: softmax(s.tril().triu(1 - window))),
}


def shares(a: Tensor, b: Tensor) -> Tensor:
    return torch.stack([a, b]).softmax(0)[..., None]


RIGHT["merge_parts"] = {
    "softmax": lambda oa, a, ob, b: (shares(a, b) * torch.stack([oa, ob])).sum(0),
    "less the larger": lambda oa, a, ob, b: (
        ((a - torch.maximum(a, b)).exp()[:, None] * oa + (b - torch.maximum(a, b)).exp()[:, None] * ob)
        / ((a - torch.maximum(a, b)).exp() + (b - torch.maximum(a, b)).exp())[:, None]
    ),
    "logaddexp": lambda oa, a, ob, b: (
        (a - torch.logaddexp(a, b)).exp()[:, None] * oa + (b - torch.logaddexp(a, b)).exp()[:, None] * ob
    ),
}
WRONG["merge_parts"] = {
    "added": ("an average by itself", lambda oa, a, ob, b: oa + ob),
    "halved": ("Each half counts the same", lambda oa, a, ob, b: (oa + ob) / 2),
    "by lse": ("It is a logarithm", lambda oa, a, ob, b: (a[:, None] * oa + b[:, None] * ob) / (a + b)[:, None]),
    "not divided": ("not divided", lambda oa, a, ob, b: a.exp()[:, None] * oa + b.exp()[:, None] * ob),
    "exchanged": ("are exchanged", lambda oa, a, ob, b: (shares(b, a) * torch.stack([oa, ob])).sum(0)),
    "overflow": (
        "exp(1000) is infinite",
        lambda oa, a, ob, b: (a.exp()[:, None] * oa + b.exp()[:, None] * ob) / (a.exp() + b.exp())[:, None],
    ),
}


def phi(x: Tensor) -> Tensor:
    return F.elu(x) + 1


def linear(q: Tensor, k: Tensor, v: Tensor, first: int = 0) -> Tensor:
    return normalised((q @ k.T).tril(first)) @ v


def recurrent(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    table, total, rows = torch.zeros(k.shape[1], v.shape[1]), torch.zeros(k.shape[1]), []
    for t in range(len(q)):
        table, total = table + torch.outer(phi(k[t]), v[t]), total + phi(k[t])
        rows.append(phi(q[t]) @ table / (phi(q[t]) @ total))
    return torch.stack(rows)


RIGHT["linear_attention"] = {
    "recurrent": recurrent,
    "parallel": lambda q, k, v: linear(phi(q), phi(k), v),
}
WRONG["linear_attention"] = {
    "ahead": ("what comes after them", lambda q, k, v: linear(phi(q), phi(k), v, len(q))),
    "not divided": ("denominator is missing", lambda q, k, v: (phi(q) @ phi(k).T).tril() @ v),
    "no features": ("φ is missing", linear),
    "no one": ("lacks its + 1", lambda q, k, v: linear(F.elu(q), F.elu(k), v)),
    "keys only": ("queries and of keys", lambda q, k, v: linear(q, phi(k), v)),
    "softmax": ("no softmax", lambda q, k, v: softmax(hide(q @ k.T / q.shape[1] ** 0.5)) @ v),
    "without itself": ("end before the word itself", lambda q, k, v: linear(phi(q), phi(k), v, -1)),
}

# --- lesson 8 ------------------------------------------------------------------------------------------------------


def below(w: Tensor) -> Tensor:
    return w.diagonal(-1, 1, 2)


def before(ids: Tensor, first: int = 1) -> Tensor:
    """(T, T) True where the word before the key is the query's, at least `first` words back."""
    T = len(ids)
    return torch.tensor([[s > 0 and bool(ids[s - 1] == ids[t]) and t - s >= first for s in range(T)] for t in range(T)])


def on(w: Tensor, pairs: Tensor) -> Tensor:
    return (w * pairs).sum(-1)[:, pairs.any(-1)].mean(-1)


def by_pairs(w: Tensor, ids: Tensor) -> Tensor:
    shares: dict[int, Tensor] = {}
    for t in range(len(ids)):
        for s in range(1, t):
            if ids[s - 1] == ids[t]:
                shares[t] = shares.get(t, torch.zeros(len(w))) + w[:, t, s]
    return torch.stack(list(shares.values())).mean(0)


def copies(ids: Tensor) -> Tensor:
    return (ids[:, None] == ids).tril(-1)


def twins(ids: Tensor) -> Tensor:
    return (ids[:, None] == ids) & ~torch.eye(len(ids), dtype=torch.bool)


def nearest(pairs: Tensor) -> Tensor:
    return pairs & (pairs.flip(-1).cumsum(-1) == 1).flip(-1)


def rolled(ids: Tensor, by: int) -> Tensor:
    return ids[:, None] == ids.roll(by)


def averaged(w: Tensor, ids: Tensor) -> Tensor:
    return torch.stack([w[:, t, keys].mean(-1) for t, keys in enumerate(before(ids)) if keys.any()]).mean(0)


def gone(w: Tensor) -> Tensor:
    return w * (torch.arange(w.shape[-1]) > 0)


RIGHT["previous_score"] = {
    "loops": lambda w: torch.stack([sum(one[t, t - 1] for t in range(1, len(one))) / (len(one) - 1) for one in w]),
    "a part's diagonal": lambda w: w[:, 1:, :-1].diagonal(0, 1, 2).mean(-1),
    "by a mask": lambda w: (w * torch.eye(w.shape[-1]).roll(-1, 1)).tril(-1).sum((1, 2)) / (w.shape[-1] - 1),
}
WRONG["previous_score"] = {
    "the next": ("below the diagonal", lambda w: w.diagonal(1, 1, 2).mean(-1)),
    "itself": ("gives to itself", lambda w: w.diagonal(0, 1, 2).mean(-1)),
    "by all words": ("divided by T", lambda w: below(w).sum(-1) / w.shape[-1]),
    "rolled": ("brings the last word round", lambda w: w.roll(1, -1).diagonal(0, 1, 2).mean(-1)),
    "summed": ("sum over words", lambda w: below(w).sum(-1)),
    "over heads": ("Heads differ", lambda w: below(w).mean()),
    "the first column": ("to the first word of all", lambda w: w[:, 1:, 0].mean(-1)),
}
RIGHT["induction_score"] = {
    "loops": by_pairs,
    "copies moved by one": lambda w, ids: on(w, F.pad(copies(ids)[:, :-1], (1, 0)).bool().tril(-1)),
}
WRONG["induction_score"] = {
    "copies": ("the copies themselves", lambda w, ids: on(w, copies(ids))),
    "before the copy": ("what came before the copy", lambda w, ids: on(w, F.pad(copies(ids)[:, 1:], (0, 1)))),
    "all words": ("leave them out", lambda w, ids: (w * before(ids)).sum(-1).mean(-1)),
    "summed": ("sum over words", lambda w, ids: (w * before(ids)).sum((1, 2))),
    "a pair each": ("counts once", lambda w, ids: (w * before(ids)).sum((1, 2)) / before(ids).sum()),
    "later ones": ("before the query", lambda w, ids: on(w, F.pad(twins(ids)[:, :-1], (1, 0)))),
    "not before the query": ("s < t", lambda w, ids: on(w, before(ids, -len(ids)))),
    "rolled": ("roll(1) brings the last word round", lambda w, ids: on(w, rolled(ids, 1).tril(-1))),
    "rolled, and later ones": ("roll(1) brings the last word round", lambda w, ids: on(w, rolled(ids, 1))),
    "rolled back": ("what came before the copy", lambda w, ids: on(w, rolled(ids, -1).tril(-1))),
    "averaged": ("add them up", averaged),
    "averaged over all": ("add them up", lambda w, ids: (w * before(ids))[:, before(ids).any(-1)].mean((1, 2))),
    "the nearest": ("Only one earlier copy", lambda w, ids: on(w, nearest(before(ids)))),
    "over heads": ("Heads differ", lambda w, ids: on(w, before(ids)).mean()),
}
RIGHT["without_sink"] = {
    "clamped": lambda w: gone(w) / gone(w).sum(-1, keepdim=True).clamp(min=1e-30),
    "nan to 0": lambda w: normalised(gone(w)).nan_to_num(),
    "the rest by what the sink left": lambda w: torch.cat([gone(w)[:, :1], gone(w)[:, 1:] / (1 - w[:, 1:, :1])], 1),
}
WRONG["without_sink"] = {
    "not shared": ("no longer add up", gone),
    "0 / 0": ("0 / 0", lambda w: normalised(gone(w))),
    "cut": ("Keep the shape", lambda w: normalised(w[:, 1:, 1:])),
    "the first row kept": ("all of it is 0", lambda w: torch.cat([w[:, :1], normalised(gone(w)[:, 1:])], 1)),
    "columns": ("Each column adds up", lambda w: (gone(w) / gone(w).sum(-2, keepdim=True)).nan_to_num()),
    "softmax again": ("They are shares already", lambda w: softmax(gone(w))),
    "softmax again, then 0": ("They are shares already", lambda w: gone(softmax(gone(w)))),
    "softmax of the hidden": ("They are shares already", lambda w: softmax(hide(gone(w), gone(w) == 0))),
    "softmax of all but the first": (
        "They are shares already",
        lambda w: torch.cat([torch.zeros_like(w[:, :1]), F.pad(softmax(w[:, 1:, 1:]), (1, 0))], 1),
    ),
}

# --- lesson 9 ------------------------------------------------------------------------------------------------------


def side_by_side(z: Tensor, h: int, keep: bool = False) -> Tensor:
    return merged(alone(z, h, keep)[None])[0]


def alone(z: Tensor, h: int, keep: bool = False) -> Tensor:
    return z * ((torch.arange(len(z)) == h) == keep)[:, None, None]


def layers_of(w: Tensor, identity: float = 0.5, of_mean: float = 0.5) -> list[Tensor]:
    return list(w.mean(1) * of_mean + torch.eye(w.shape[-1]) * identity)


def chained(layers: list[Tensor]) -> Tensor:
    return torch.linalg.multi_dot(layers[::-1]) if len(layers) > 1 else layers[0]


RIGHT["without_head"] = {
    "merged": lambda z, W, h: side_by_side(z, h) @ W,
    "a sum over heads": lambda z, W, h: sum(z[n] @ W.view(len(z), -1, W.shape[1])[n] for n in range(len(z)) if n != h),
    "all less the one": lambda z, W, h: merged(z[None])[0] @ W - side_by_side(z, h, keep=True) @ W,
}
WRONG["without_head"] = {
    "it alone": ("h is taken out", lambda z, W, h: side_by_side(z, h, keep=True) @ W),
    "all": ("All heads are still there", lambda z, W, h: merged(z[None])[0] @ W),
    "counted from 1": ("Heads count from 0", lambda z, W, h: side_by_side(z, h - 1) @ W),
    "not turned": ("turn first", lambda z, W, h: alone(z, h).reshape(z.shape[1], -1) @ W),
    "made up for": ("a gap", lambda z, W, h: side_by_side(z, h) @ W * len(z) / (len(z) - 1)),
}
RIGHT["brought"] = {
    "a diagonal matrix": lambda w, v: w @ torch.diag_embed(v.norm(dim=-1)),
    "the norms of what is brought": lambda w, v: (w[..., None] * v[:, None]).norm(dim=-1),
}
WRONG["brought"] = {
    "squares": ("sizes are squared", lambda w, v: w * v.square().sum(-1)[:, None]),
    "sums": ("added up", lambda w, v: w * v.sum(-1)[:, None]),
    "rows of 1": ("need not", lambda w, v: normalised(w * v.norm(dim=-1)[:, None])),
    "of the mix": ("whole mix", lambda w, v: (w @ v).norm(dim=-1)),
}
RIGHT["rollout"] = {
    "chained": lambda w: chained(layers_of(w)),
    "rows from the last layer down": lambda w: chained([A.T for A in layers_of(w)[::-1]]).T,
}
WRONG["rollout"] = {
    "turned round": ("wrong way round", lambda w: chained(layers_of(w)[::-1])),
    "no residual": ("Take half of the identity", lambda w: chained(layers_of(w, 0, 1))),
    "not halved": ("not halved", lambda w: chained(layers_of(w, 1, 1))),
    "heads added up": ("take their mean", lambda w: chained(layers_of(w, 0.5, 0.5 * w.shape[1]))),
    "the last layer": ("This is one layer", lambda w: layers_of(w)[-1]),
    "an average": ("Layers are averaged", lambda w: torch.stack(layers_of(w)).mean(0)),
    "number by number": ("product of matrices", lambda w: torch.stack(layers_of(w)).prod(0)),
}

# --- lesson 10 -----------------------------------------------------------------------------------------------------


def rows(logits: Tensor, ids: Tensor) -> Tensor:
    """log p of the next token."""
    return torch.stack([logits[t].log_softmax(-1)[ids[t + 1]] for t in range(len(ids) - 1)])


def likeliest(logits: Tensor, k: int) -> Tensor:
    return logits >= logits.sort().values[-k]


def drawn(logits: Tensor, k: int, temperature: float = 1.0) -> Tensor:
    return softmax(hide(logits / temperature, ~likeliest(logits, k)))


def normed_after(x: Tensor, norm1: Any, attention: Any, norm2: Any, mlp: Any) -> Tensor:
    x = norm1(x + attention(x))
    return norm2(x + mlp(x))


RIGHT["block"] = {
    "in one": lambda x, n1, a, n2, m: x + a(n1(x)) + m(n2(x + a(n1(x)))),
    "text by text": lambda x, n1, a, n2, m: torch.cat([y + m(n2(y)) for y in (t + a(n1(t)) for t in x.split(1))]),
}
WRONG["block"] = {
    "no stream": ("The stream itself is missing", lambda x, n1, a, n2, m: m(n2(a(n1(x))))),
    "no stream at last": ("takes the place of the stream", lambda x, n1, a, n2, m: m(n2(x + a(n1(x))))),
    "no norms": ("without its norm", lambda x, n1, a, n2, m: x + a(x) + m(x + a(x))),
    "norms after": ("The norm came after", normed_after),
    "side by side": ("reads x as it came in", lambda x, n1, a, n2, m: x + a(n1(x)) + m(n2(x))),
    "one norm": ("one is used twice", lambda x, n1, a, n2, m: x + a(n1(x)) + m(n1(x + a(n1(x))))),
    "the MLP first": ("The MLP came first", lambda x, n1, a, n2, m: x + m(n2(x)) + a(n1(x + m(n2(x))))),
}
RIGHT["next_losses"] = {
    "row by row": lambda logits, ids: -rows(logits, ids),
    "gathered": lambda logits, ids: logits[:-1].logsumexp(-1) - logits[:-1].gather(1, ids[1:, None])[:, 0],
}
WRONG["next_losses"] = {
    "the same token": ("Row t is held against token t", lambda z, ids: F.cross_entropy(z, ids, reduction="none")),
    "backwards": ("wrong way round", lambda z, ids: F.cross_entropy(z[1:], ids[:-1], reduction="none")),
    "no sign": ("The sign is missing", rows),
    "no log": ("grows without end", lambda z, ids: rows(z, ids).exp()),
    "scores": ("These are scores", lambda z, ids: z[:-1].gather(1, ids[1:, None])[:, 0]),
    "two softmaxes": ("taken twice", lambda z, ids: -rows(softmax(z), ids)),
    "base 2": ("base 2", lambda z, ids: -rows(z, ids) / math.log(2)),
    "mean": ("the mean", lambda z, ids: -rows(z, ids).mean()),
}
RIGHT["next_shares"] = {
    "sorted": lambda z, heat, k: drawn(z, k, heat),
    "put in their places": lambda z, heat, k: torch.zeros_like(z).scatter(
        0, z.topk(k).indices, softmax(z.topk(k).values / heat)
    ),
    "divided again": lambda z, heat, k: normalised(softmax(z / heat) * likeliest(z, k)),
}
WRONG["next_shares"] = {
    "no temperature": ("does nothing", lambda z, heat, k: drawn(z, k)),
    "multiplied": ("multiplied by the temperature", lambda z, heat, k: drawn(z, k, 1 / heat)),
    "divided after": ("divided by the temperature", lambda z, heat, k: drawn(z, k) / heat),
    "all": ("All tokens may be drawn", lambda z, heat, k: softmax(z / heat)),
    "a lost share": ("0 after the softmax", lambda z, heat, k: softmax(z / heat) * likeliest(z, k)),
    "one less": ("One token too many or too few", lambda z, heat, k: drawn(z, k - 1, heat)),
    "the least likely": ("least likely", lambda z, heat, k: softmax(hide(z / heat, likeliest(z, len(z) - k)))),
    "in order": ("order of their size", lambda z, heat, k: softmax(z.topk(k).values / heat)),
    "0 for -inf": ("exp(0) = 1", lambda z, heat, k: softmax(hide(z / heat, ~likeliest(z, k), 0.0))),
}

# --- the tests -----------------------------------------------------------------------------------------------------


def as_answer(name: str, made: Any) -> Any:
    """A forward as the layer that has it."""
    solution = EXERCISES[name].solution
    layer = isinstance(solution, type) and not isinstance(made, type)
    return type(name, (solution,), {"forward": lambda self, *x: made(self, *x)}) if layer else made


WRONG_CASES = [(name, title) for name, wrongs in WRONG.items() for title in wrongs]
RIGHT_CASES = [(name, title) for name, rights in RIGHT.items() for title in rights]


@pytest.mark.parametrize(("name", "title"), WRONG_CASES)
def test_a_typical_mistake_is_refused_in_words_of_the_idea(name: str, title: str) -> None:
    words, made = WRONG[name][title]
    torch.manual_seed(0)
    for seed in range(5):
        with pytest.raises(Wrong) as refusal:
            EXERCISES[name].check(as_answer(name, made), torch.Generator().manual_seed(seed))
        assert words in str(refusal.value)


@pytest.mark.parametrize(("name", "title"), RIGHT_CASES)
def test_a_right_answer_of_another_making_is_taken(name: str, title: str) -> None:
    torch.manual_seed(0)
    for seed in range(5):
        EXERCISES[name].check(as_answer(name, RIGHT[name][title]), torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", EXERCISES)
def test_the_solution_is_taken_whatever_the_inputs(name: str) -> None:
    torch.manual_seed(0)
    for seed in range(30):
        EXERCISES[name].check(EXERCISES[name].solution, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", EXERCISES)
def test_each_exercise_has_right_answers_wrong_ones_and_hints(name: str) -> None:
    assert len(RIGHT[name]) >= 2
    assert len({words for words, _ in WRONG[name].values()}) >= 3
    assert len(EXERCISES[name].hints) >= 2
