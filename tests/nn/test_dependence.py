"""What depends on what: gradients, the future that has no influence, and the order of the tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.functional import jacobian
from torch.func import functional_call

Rung, Tokens = Callable[..., nn.Module], Callable[..., Tensor]
WITHOUT_MASK, CAUSAL = ("simple", "raw", "linear"), ("causal", "wrapper", "multi-head")
T, D_IN = 7, 5


@pytest.mark.parametrize("name", WITHOUT_MASK + CAUSAL)
def test_requirement_19_gradients_are_those_of_finite_differences(rung: Rung, tokens: Tokens, name: str) -> None:
    layer = rung(name)
    names = [n for n, _ in layer.named_parameters()]

    def output(x: Tensor, *weights: Tensor) -> Tensor:
        result: Tensor = functional_call(layer, dict(zip(names, weights, strict=True)), (x,))
        return result

    assert torch.autograd.gradcheck(output, (tokens(2, 4, D_IN).requires_grad_(), *layer.parameters()))


@pytest.mark.parametrize("name", ["raw", "linear", *CAUSAL])
def test_requirement_19_every_weight_learns(rung: Rung, tokens: Tokens, name: str) -> None:
    layer = rung(name)
    layer(tokens()).square().sum().backward()
    for parameter, weight in layer.named_parameters():
        if not parameter.endswith("W_key.bias"):  # it moves all scores of a row alike, which the softmax ignores
            assert weight.grad is not None
            assert (weight.grad.abs() > 1e-9).all(), parameter


def influence(layer: nn.Module, x: Tensor) -> Tensor:
    """(T, T): the largest derivative of output t by input s."""
    return jacobian(layer, x).abs().amax((1, 3))  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("name", CAUSAL)
def test_requirement_08_the_future_has_exactly_no_influence(rung: Rung, tokens: Tokens, name: str) -> None:
    found = influence(rung(name), tokens(T, D_IN))
    assert (found.triu(1) == 0).all()
    assert (found[torch.ones(T, T).tril().bool()] > 1e-9).all()


@pytest.mark.parametrize("name", WITHOUT_MASK)
def test_requirement_30_every_token_is_one_step_from_every_other(rung: Rung, tokens: Tokens, name: str) -> None:
    assert (influence(rung(name), tokens(T, D_IN)) > 1e-9).all()


def test_requirement_30_a_recurrent_network_needs_a_step_a_token(tokens: Tokens) -> None:
    """Linear and halving at each step: what it keeps of the first token shrinks with the distance."""
    network = nn.RNN(D_IN, D_IN, nonlinearity="relu", bias=False).double()
    network.weight_ih_l0.data = torch.eye(D_IN).double()
    network.weight_hh_l0.data = torch.eye(D_IN).double() / 2
    first = influence(lambda x: network(x)[0], tokens(T, D_IN).abs())[:, 0]
    torch.testing.assert_close(first, 0.5 ** torch.arange(T).double())


@pytest.mark.parametrize("name", WITHOUT_MASK)
def test_the_order_of_the_tokens_is_not_seen_without_a_mask(rung: Rung, tokens: Tokens, name: str) -> None:
    layer, x, order = rung(name), tokens(), torch.randperm(T, generator=torch.Generator().manual_seed(2))
    out, attn = layer.attend(x)
    shuffled, shuffled_attn = layer.attend(x[:, order])
    torch.testing.assert_close(shuffled, out[:, order], atol=1e-14, rtol=0)
    torch.testing.assert_close(shuffled_attn.to_dense(), attn.to_dense()[:, order][:, :, order], atol=1e-14, rtol=0)


@pytest.mark.parametrize("name", CAUSAL)
def test_requirement_31_token_by_token_in_any_order_is_all_at_once(rung: Rung, tokens: Tokens, name: str) -> None:
    layer, x = rung(name), tokens()
    out = layer(x)
    for t in (3, 0, 6, 1, 5, 2, 4):
        torch.testing.assert_close(layer(x[:, : t + 1])[:, -1], out[:, t], atol=1e-14, rtol=0)


@pytest.mark.parametrize("name", WITHOUT_MASK)
def test_requirement_31_row_by_row_in_any_order_is_all_at_once(rung: Rung, tokens: Tokens, name: str) -> None:
    out, attn = rung(name).attend(tokens())
    for t in (3, 0, 6, 1, 5, 2, 4):
        row = torch.einsum("bs,bsd->bd", attn[:, t], attn.v)
        torch.testing.assert_close(row, out[:, t], atol=1e-14, rtol=0)


@pytest.mark.parametrize("name", WITHOUT_MASK + CAUSAL)
def test_what_shares_a_batch_has_no_influence(rung: Rung, tokens: Tokens, name: str) -> None:
    layer, x = rung(name), tokens()
    alone, together = layer(x[:1]), layer(x)
    torch.testing.assert_close(together[:1], alone, atol=1e-14, rtol=0)
    torch.testing.assert_close(layer(x[0]), alone[0], atol=1e-14, rtol=0)
