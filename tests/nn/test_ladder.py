"""The ladder of layers against the textbook, and against each other; and each broken line is seen."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead import reference
from clearhead.nn import (
    CausalAttention,
    MultiHeadAttention,
    MultiHeadAttentionWrapper,
    RawSelfAttention,
    SelfAttention,
    SimpleSelfAttention,
)
from clearhead.testing import assert_close

Rung, Tokens = Callable[..., nn.Module], Callable[..., Tensor]
NAMES = {
    SimpleSelfAttention: "simple",
    RawSelfAttention: "raw",
    SelfAttention: "linear",
    CausalAttention: "causal",
    MultiHeadAttentionWrapper: "wrapper",
    MultiHeadAttention: "multi-head",
}
CAUSAL = ("causal", "wrapper", "multi-head")
B, T, D_IN, D_OUT, H = 2, 7, 5, 4, 2


# --- each rung is the textbook's formula -----------------------------------------------------------------------


def projected(layer: nn.Module, x: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """q, k, v of every head, in x's dtype: of one large projection, head h has columns h·D to (h+1)·D."""
    if isinstance(layer, SimpleSelfAttention):
        return [(x * x.shape[-1] ** 0.25, x * x.shape[-1] ** 0.25, x)]  # the textbook's 1/√d then leaves x·x
    if isinstance(layer, MultiHeadAttentionWrapper):
        return [projected(head, x)[0] for head in layer.heads]
    if isinstance(layer, RawSelfAttention):
        whole = [x @ W.to(x.dtype) for W in (layer.W_query, layer.W_key, layer.W_value)]
    else:
        linears = (layer.W_query, layer.W_key, layer.W_value)
        whole = [x @ W.weight.T.to(x.dtype) + (0 if W.bias is None else W.bias.to(x.dtype)) for W in linears]
    heads = layer.num_heads if isinstance(layer, MultiHeadAttention) else 1
    return list(zip(*(part.chunk(heads, -1) for part in whole), strict=True))


def textbook(layer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """The output, and the weights (…, H, T, T), head by head, in x's dtype."""
    causal = isinstance(layer, (CausalAttention, MultiHeadAttentionWrapper, MultiHeadAttention))
    mask = reference.causal(x.shape[-2], x.shape[-2]) if causal else None
    heads = projected(layer, x)
    out = torch.cat([reference.attention(*qkv, mask=mask) for qkv in heads], -1)
    if isinstance(layer, MultiHeadAttention):
        out = out @ layer.out_proj.weight.T.to(x.dtype) + layer.out_proj.bias.to(x.dtype)
    return out, torch.stack([reference.weights(q, k, mask=mask) for q, k, _ in heads], -3)


@torch.no_grad()
def check_the_formula(layer: nn.Module, x: Tensor) -> None:
    out, attn = layer.attend(x)
    (exact, exact_weights), (plain, plain_weights) = textbook(layer, x.double()), textbook(layer, x)
    assert_close(out, exact, plain, terms=D_IN + T + D_OUT, what="output")
    several = isinstance(layer, (MultiHeadAttentionWrapper, MultiHeadAttention))
    weights = attn.to_dense() if several else attn.to_dense().unsqueeze(-3)
    assert_close(weights.to(x.dtype), exact_weights, plain_weights, terms=D_IN + D_OUT, what="weights")
    assert torch.equal(layer(x), out)


@pytest.mark.parametrize("shape", [(B, T, D_IN), (T, D_IN), (1, 1, D_IN), (0, 3, D_IN), (2, 0, D_IN)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES.values())
def test_each_rung_is_the_textbooks_formula(
    rung: Rung, tokens: Tokens, name: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    check_the_formula(rung(name, dtype=dtype), tokens(*shape, dtype=dtype))


@pytest.mark.parametrize("name", NAMES.values())
@torch.no_grad()
def test_requirement_06_and_07_rows_are_distributions_and_outputs_their_averages(
    rung: Rung, tokens: Tokens, name: str
) -> None:
    layer, x = rung(name), tokens()
    if isinstance(layer, MultiHeadAttention):
        layer.load_state_dict(passes_on(D_OUT), strict=False)  # what the projection is given, then, is the average
    out, attn = layer.attend(x)
    weights, v = attn.to_dense(), torch.cat([v for _, _, v in projected(layer, x)], -1)
    assert (weights >= 0).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]).double(), atol=1e-6, rtol=0)
    assert (out <= v.amax(-2, keepdim=True) + 1e-12).all()
    assert (out >= v.amin(-2, keepdim=True) - 1e-12).all()


def test_requirement_17_one_product_replaces_two_loops(tokens: Tokens) -> None:
    x = tokens(T, D_IN)
    loops = [[sum(float(a) * float(b) for a, b in zip(x[t], x[s], strict=True)) for s in range(T)] for t in range(T)]
    attn = SimpleSelfAttention().attend(x)[1]
    torch.testing.assert_close(attn.to_dense().log() + attn.lse[:, None], torch.tensor(loops).double())


def test_requirement_27_the_last_rung_is_pytorchs_fused_call_between_projections(rung: Rung, tokens: Tokens) -> None:
    layer, x = rung("multi-head"), tokens()
    q, k, v = (W(x).unflatten(-1, (H, -1)).transpose(1, 2) for W in (layer.W_query, layer.W_key, layer.W_value))
    fused = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert torch.equal(layer(x), layer.out_proj(fused.transpose(1, 2).reshape(B, T, D_OUT)))


# --- the rungs are each other, on copied weights ---------------------------------------------------------------


def passes_on(width: int) -> dict[str, Tensor]:
    """An output projection that changes nothing."""
    return {"out_proj.weight": torch.eye(width), "out_proj.bias": torch.zeros(width)}


def check_same(one: nn.Module, other: nn.Module, x: Tensor) -> None:
    (out, attn), (other_out, other_attn) = one.attend(x), other.attend(x)
    torch.testing.assert_close(out, other_out, atol=1e-6, rtol=0)
    weights = other_attn.to_dense().reshape(attn.shape)
    torch.testing.assert_close(attn.to_dense(), weights, atol=1e-6, rtol=0)


@pytest.mark.parametrize("qkv_bias", [False, True])
@torch.no_grad()
def test_trap_28_all_variants_agree_on_copied_weights(tokens: Tokens, qkv_bias: bool) -> None:
    x = tokens(dtype=torch.float32)
    linear = SelfAttention(D_IN, D_OUT, qkv_bias)
    causal = CausalAttention(D_IN, D_OUT, T, 0.0, qkv_bias)
    causal.load_state_dict(linear.state_dict())
    torch.testing.assert_close(causal(x)[:, -1], linear(x)[:, -1], atol=1e-6, rtol=0)  # the last token sees all
    stacked = MultiHeadAttentionWrapper(D_IN, D_OUT, T, 0.0, num_heads=1, qkv_bias=qkv_bias)
    stacked.heads[0].load_state_dict(linear.state_dict())
    check_same(stacked, causal, x)
    split = MultiHeadAttention(D_IN, D_OUT, T, 0.0, num_heads=1, qkv_bias=qkv_bias)
    split.load_state_dict(linear.state_dict() | passes_on(D_OUT))
    check_same(split, causal, x)


@torch.no_grad()
def test_requirement_18_raw_matrices_are_the_linear_ones_transposed(tokens: Tokens) -> None:
    linear, raw = SelfAttention(D_IN, D_OUT), RawSelfAttention(D_IN, D_OUT)
    for name, matrix in raw.named_parameters():
        matrix.copy_(linear.get_parameter(f"{name}.weight").T)
    check_same(raw, linear, tokens(dtype=torch.float32))


@torch.no_grad()
def test_without_weights_is_the_case_of_identity_matrices(tokens: Tokens) -> None:
    raw = RawSelfAttention(D_IN, D_IN)
    for matrix, size in zip(raw.parameters(), (D_IN**0.25, D_IN**0.25, 1), strict=True):
        matrix.copy_(torch.eye(D_IN) * size)  # the scores are not scaled on the first rung
    check_same(SimpleSelfAttention(), raw, tokens(dtype=torch.float32))


@pytest.mark.parametrize("heads", [2, 3, 4])
@torch.no_grad()
def test_requirement_24_splitting_one_large_matrix_is_stacking_heads(tokens: Tokens, heads: int) -> None:
    """With W = [W₁ | W₂ | …] queries, keys, values and weights differ by 0; outputs as two kernels do."""
    x = tokens(dtype=torch.float32)
    stacked = MultiHeadAttentionWrapper(D_IN, 3, T, 0.0, heads, qkv_bias=True)
    split = MultiHeadAttention(D_IN, 3 * heads, T, 0.0, heads, qkv_bias=True)
    parts = [head.state_dict() for head in stacked.heads]
    split.load_state_dict({name: torch.cat([p[name] for p in parts]) for name in parts[0]} | passes_on(3 * heads))
    (out, attn), (split_out, split_attn) = stacked.attend(x), split.attend(x)
    for name in ("q", "k", "v"):
        assert torch.equal(getattr(attn, name), getattr(split_attn, name))
    assert torch.equal(attn.to_dense(), split_attn.to_dense())
    torch.testing.assert_close(out, split_out, atol=1e-6, rtol=0)


# --- dropout ---------------------------------------------------------------------------------------------------


@torch.no_grad()
def check_dropout(layer: nn.Module, x: Tensor) -> None:
    """Which weights were dropped shows in the output of a head whose values are the unit vectors."""
    for W in (getattr(layer, "W_value", None), getattr(layer, "out_proj", None)):
        if W is not None:
            W.weight.copy_(torch.eye(T))
            W.bias.zero_()
    torch.manual_seed(0)
    dropped, attn = layer.train().attend(x)
    weights = attn.to_dense().reshape(T, T)
    kept = dropped != 0
    assert any(0 < kept[s:, s].sum() < T - s for s in range(T))  # not a whole key or value at a time
    torch.testing.assert_close(dropped[kept], weights[kept] / 0.5)
    torch.testing.assert_close(weights.sum(-1), torch.ones(T).double())  # reported before dropout
    torch.testing.assert_close(layer.eval()(x), weights)


def with_dropout(name: str) -> nn.Module:
    """One head of T values for T tokens."""
    torch.manual_seed(0)
    if name == "causal":
        return CausalAttention(T, T, T, 0.5, qkv_bias=True).double()
    return MultiHeadAttention(T, T, T, 0.5, num_heads=1, qkv_bias=True).double()


@pytest.mark.parametrize("name", ["causal", "multi-head"])
def test_requirement_20_dropout_is_on_the_weights_in_training_only(name: str) -> None:
    check_dropout(with_dropout(name), torch.eye(T).double())


@pytest.mark.parametrize("name", CAUSAL)
@torch.no_grad()
def test_trap_08_no_dropout_in_evaluation_and_all_of_it_dropped_at_1(rung: Rung, tokens: Tokens, name: str) -> None:
    layer = rung(name, dropout=1.0)
    assert torch.equal(layer.eval()(tokens()), rung(name)(tokens()))
    out, attn = layer.train().attend(tokens())
    nothing = layer.out_proj.bias if isinstance(layer, MultiHeadAttention) else torch.zeros(D_OUT).double()
    assert torch.equal(out, nothing.expand_as(out))
    torch.testing.assert_close(attn.to_dense().sum(-1), torch.ones(attn.shape[:-1]).double())


@torch.no_grad()
def test_requirement_20_dropout_keeps_the_mean_of_a_row() -> None:
    """64 equal weights, half of them dropped: the sum of a row has mean 1 and standard deviation √(1/64) = 0.125."""
    layer = CausalAttention(1, 1, 64, dropout=0.5)
    layer.W_query.weight.zero_()
    layer.W_value.weight.fill_(1.0)
    torch.manual_seed(0)
    sums = layer(torch.ones(1000, 64, 1))[:, -1]
    assert float(sums.mean()) == pytest.approx(1, abs=0.02)
    assert float(sums.std()) == pytest.approx(0.125, abs=0.01)


# --- break a line, and see that a check fails ------------------------------------------------------------------

BROKEN = {
    "forget the scale": (SelfAttention, " / k.shape[-1] ** 0.5", ""),
    "scale by the width of the input": (SelfAttention, "k.shape[-1]", "x.shape[-1]"),
    "scale a score without weights": (SimpleSelfAttention, "x @ x.mT", "x @ x.mT / x.shape[-1] ** 0.5"),
    "report other weights than were used": (SimpleSelfAttention, "scale=1.0", "scale=None"),
    "softmax over the queries": (CausalAttention, "dim=-1", "dim=-2"),
    "transpose the mask": (CausalAttention, "triu(1)", "tril(-1)"),
    "hide the token itself": (CausalAttention, "triu(1)", "triu(0)"),
    "let the next token be seen": (CausalAttention, "triu(1)", "triu(2)"),
    "zero the scores instead of hiding them": (CausalAttention, "-math.inf", "0.0"),
    "report weights without the mask": (CausalAttention, ", mask=masks.causal()", ""),
    "swap queries and keys": (RawSelfAttention, "q @ k.mT", "k @ q.mT"),
    "take the keys for values": (RawSelfAttention, "weights @ v", "weights @ k"),
    "stack the heads of a batch": (MultiHeadAttentionWrapper, "dim=-3", "dim=0"),
    "split heads by a wrong view": (
        MultiHeadAttention,
        ".view(*x.shape[:2], self.num_heads, self.head_dim).transpose(1, 2)",
        ".view(x.shape[0], self.num_heads, x.shape[1], self.head_dim)",
    ),
    "join heads by a wrong view": (
        MultiHeadAttention,
        "context.transpose(1, 2).flatten(2)",
        "context.reshape(x.shape[0], x.shape[1], -1)",
    ),
    "forget the output projection": (MultiHeadAttention, "self.out_proj(", "("),
    "let all heads look ahead": (MultiHeadAttention, "is_causal=True", "is_causal=False"),
}
BROKEN_DROPOUT = {
    "drop in evaluation": (CausalAttention, "self.training", "True"),
    "forget to drop": (CausalAttention, "nn.functional.dropout(weights, self.dropout, self.training)", "weights"),
    "drop without making up for it": (CausalAttention, "self.training)", "self.training) * (1 - self.dropout)"),
    "drop values instead of weights": (
        CausalAttention,
        "weights = nn.functional.dropout(weights,",
        "v = nn.functional.dropout(v,",
    ),
    "drop in evaluation, fused": (MultiHeadAttention, "self.dropout if self.training else 0.0", "self.dropout"),
    "forget to drop, fused": (MultiHeadAttention, "dropout_p=dropout", "dropout_p=0.0"),
}


def break_line(monkeypatch: pytest.MonkeyPatch, kind: type[nn.Module], line: str, broken: str) -> None:
    source = textwrap.dedent(inspect.getsource(kind.attend))
    assert source.count(line) == 1, f"{line!r} occurs {source.count(line)} times: {source}"
    found = dict(vars(inspect.getmodule(kind)))
    exec(compile(source.replace(line, broken), f"<{kind.__name__}>", "exec"), found)
    monkeypatch.setattr(kind, "attend", found["attend"])


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_line_is_not_the_textbooks(
    rung: Rung, tokens: Tokens, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, line, broken = BROKEN[what]
    break_line(monkeypatch, kind, line, broken)
    with pytest.raises(AssertionError):
        check_the_formula(rung(NAMES[kind]), tokens())


@pytest.mark.parametrize("what", BROKEN_DROPOUT)
def test_a_broken_dropout_is_seen(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, line, broken = BROKEN_DROPOUT[what]
    break_line(monkeypatch, kind, line, broken)
    with pytest.raises(AssertionError):
        check_dropout(with_dropout(NAMES[kind]), torch.eye(T).double())
