"""Attention of a recurrent decoder: Bahdanau's additive score, and Luong's dot and general."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, func, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from clearhead import DTypeError, ShapeError, masks, reference
from clearhead.maps import AdditiveMap, SoftmaxMap
from clearhead.nn import AdditiveAttention, DotAttention, GeneralAttention

B, S, D_QUERY, D_KEY, A = 2, 5, 4, 8, 6
REAL = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64)


def additive() -> AdditiveAttention:
    torch.manual_seed(0)
    return AdditiveAttention(D_QUERY, D_KEY, A).double()


def general() -> GeneralAttention:
    torch.manual_seed(0)
    return GeneralAttention(D_QUERY, D_KEY).double()


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "additive": additive,
    "general": general,
    "dot": lambda: DotAttention(),
}


def states(name: str) -> tuple[Tensor, Tensor]:
    return random(B, 3, D_KEY if name == "dot" else D_QUERY), random(B, S, D_KEY)


def scores(name: str, layer: nn.Module, s: Tensor, h: Tensor) -> Tensor:
    """By the papers: vᵀ tanh(W s + U h), sᵀ W h, sᵀ h."""
    if isinstance(layer, AdditiveAttention):
        return reference.additive_scores(s, h, layer.W_query.weight.T, layer.W_key.weight.T, layer.score.weight[0])
    s = s if name == "dot" else s @ layer.W_query.weight.T
    return reference.scores(s, h, scale=1.0)


@pytest.mark.parametrize("name", LAYERS)
def test_weights_and_context_are_the_papers(name: str) -> None:
    layer, (s, h) = LAYERS[name](), states(name)
    context, attn = layer.attend(s, h, padding=REAL)
    want = reference.softmax(scores(name, layer, s, h), REAL.bool()[:, None])
    torch.testing.assert_close(attn.to_dense(), want, rtol=1e-13, atol=1e-15)
    torch.testing.assert_close(context, want @ h, rtol=1e-13, atol=1e-14)
    assert torch.equal(layer(s, h, padding=REAL), context)
    assert isinstance(attn, AdditiveMap if name == "additive" else SoftmaxMap)
    assert (attn.to_dense()[1, :, 3:] == 0).all()


@pytest.mark.parametrize("name", LAYERS)
def test_padding_is_as_if_the_padded_words_were_not_there(name: str) -> None:
    layer, (s, h) = LAYERS[name](), states(name)
    torch.testing.assert_close(layer(s, h, padding=REAL)[1], layer(s[1], h[1, :3]))
    torch.testing.assert_close(layer(s[1], h[1], padding=REAL[1]), layer(s[1], h[1, :3]))
    both = layer(s, h, padding=REAL, mask=masks.first_tokens(4))
    torch.testing.assert_close(both[0], layer(s[0], h[0, :4]))
    assert (layer(s, h, padding=torch.zeros(B, S).bool()) == 0).all()


@pytest.mark.parametrize("name", LAYERS)
def test_gradcheck(name: str) -> None:
    layer, (s, h) = LAYERS[name](), states(name)
    parameters = tuple(layer.parameters())
    inputs = (s.requires_grad_(), h.requires_grad_(), *parameters)
    assert torch.autograd.gradcheck(lambda s, h, *_: layer(s, h, padding=REAL), inputs)


@pytest.mark.parametrize("name", LAYERS)
def test_requirement_03_another_state_gives_other_weights(name: str) -> None:
    layer, (s, h) = LAYERS[name](), states(name)
    weights, moved = (layer.attend(x, h)[1].to_dense() for x in (s, s + random(B, 3, 1)))
    assert ((weights - moved).abs() > 1e-3).any()


def test_requirement_03_dot_and_general_agree_where_the_matrix_is_the_identity() -> None:
    layer = GeneralAttention(D_KEY, D_KEY).double()
    nn.init.eye_(layer.W_query.weight)
    s, h = states("dot")
    torch.testing.assert_close(layer(s, h), DotAttention()(s, h))


# --- a decoder ---------------------------------------------------------------------------------------------


class Decoder(nn.Module):
    """s_i = GRU(c_i, s_{i-1}): the state asks, and what it gets moves it on."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.cell = additive(), nn.GRUCell(D_KEY, D_QUERY, dtype=torch.float64)

    def forward(self, h: Tensor, steps: int, *, once: bool, padding: Tensor | None = None) -> Tensor:
        s, written = h.new_zeros(len(h), D_QUERY), []
        projected = self.attention.project_keys(h) if once else None
        for _ in range(steps):
            context = self.attention(s[:, None], h, projected=projected, padding=padding)[:, 0]
            s = self.cell(context, s)
            written.append(s)
        return torch.stack(written, 1)


@pytest.mark.parametrize(("once", "calls"), [(True, 1), (False, 6)])
def test_requirement_02_keys_are_projected_once_per_sentence(once: bool, calls: int) -> None:
    torch.manual_seed(1)
    decoder, h, counted = Decoder(), random(B, S, D_KEY), []
    decoder.attention.W_key.register_forward_hook(lambda *_: counted.append(1))
    out = decoder(h, 6, once=once)
    assert len(counted) == calls
    torch.testing.assert_close(out, decoder(h, 6, once=not once))


def test_requirement_02_with_the_last_state_as_context_it_is_the_plain_encoder_decoder() -> None:
    torch.manual_seed(1)
    decoder, h = Decoder(), random(B, S, D_KEY)
    only_last = (torch.arange(S) == S - 1).expand(B, S)
    s, plain = h.new_zeros(B, D_QUERY), []
    for _ in range(6):
        s = decoder.cell(h[:, -1], s)
        plain.append(s)
    torch.testing.assert_close(decoder(h, 6, once=True, padding=only_last), torch.stack(plain, 1))
    assert not torch.allclose(decoder(h, 6, once=True), torch.stack(plain, 1))


# --- layers are modules, and say what is wrong -------------------------------------------------------------


def test_parameters_are_the_papers_and_no_more() -> None:
    shapes = {name: tuple(p.shape) for name, p in additive().named_parameters()}
    assert shapes == {"W_query.weight": (A, D_QUERY), "W_key.weight": (A, D_KEY), "score.weight": (1, A)}
    assert {name: tuple(p.shape) for name, p in general().named_parameters()} == {"W_query.weight": (D_KEY, D_QUERY)}
    assert not list(DotAttention().parameters())


def test_state_dicts_round_trip() -> None:
    one, (s, h) = additive(), states("additive")
    other = AdditiveAttention(D_QUERY, D_KEY, A).double()
    other.load_state_dict(one.state_dict())
    assert torch.equal(one(s, h), other(s, h))


@pytest.mark.parametrize("name", ["additive", "general"])
def test_half_precision_and_autocast_run(name: str) -> None:
    s, h = (x.float() for x in states(name))
    layer = LAYERS[name]().float()
    want = layer(s, h)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for keys in (h, h.bfloat16()):
            torch.testing.assert_close(layer(s, keys).float(), want, rtol=0.05, atol=0.05)
    half = layer.bfloat16()(s.bfloat16(), h.bfloat16())
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), want, rtol=0.05, atol=0.05)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: AdditiveAttention(4, 8, 0), ShapeError, r"AdditiveAttention\(d_attn=0\): expected an integer >= 1"),
        (lambda: additive()(random(2, 3, 5), random(2, 5, 8)), ShapeError, r"got query = .*width of 4"),
        (lambda: additive()(random(2, 3, 4), random(2, 5, 7)), ShapeError, r"got keys = .*width of 8"),
        (lambda: additive()(random(2, 3, 4), random(3, 5, 8)), ShapeError, "same batch size"),
        (lambda: additive()(random(2, 3, 4), random(5, 8)), ShapeError, "same rank"),
        (lambda: additive()(random(2, 3, 4).float(), random(2, 5, 8)), DTypeError, "its weights are torch.float64"),
        (lambda: additive()(random(4), random(5, 8)), ShapeError, r"expected \(T, 4\) or \(B, T, 4\)"),
        (
            lambda: additive()(random(2, 3, 4), random(2, 5, 8), projected=random(2, 5, 8)),
            ShapeError,
            r"projected=.*\(2, 5, 8\)\): expected what project_keys\(keys\) gives, \(2, 5, 6\)",
        ),
        (
            lambda: additive()(random(2, 3, 4), random(2, 5, 8), projected=[1]),
            DTypeError,
            r"AdditiveAttention\(projected=list\): expected a float tensor on cpu",
        ),
        (
            lambda: additive()(random(2, 3, 4), random(2, 5, 8), mask=torch.zeros(3, 5)),
            DTypeError,
            r"where there is none to pass and the mask is 0 or -inf, pass mask == 0",
        ),
        (
            lambda: additive()(random(2, 3, 4), random(2, 5, 8), padding=torch.ones(5).bool()),
            ShapeError,
            r"expected shape \(2, 5\), .* got the flags of one text, \(5,\) or \(1, 5\)",
        ),
        (
            lambda: additive()(random(2, 3, 4), random(2, 5, 8), padding=torch.ones(2, 4).bool()),
            ShapeError,
            r"padding\(keys=...\): expected shape \(2, 5\)",
        ),
        (lambda: DotAttention()(random(2, 3, 4), random(2, 5, 8)), ShapeError, r"DotAttention got keys = .*width of 4"),
        (lambda: general()(random(2, 3, 8), random(2, 5, 8)), ShapeError, r"GeneralAttention got query = .*width of 4"),
    ],
)
def test_bad_input_names_shapes(call: Callable[[], Tensor], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("name", LAYERS)
def test_without_numbers_there_are_shapes(name: str) -> None:
    """On the meta device, and under FakeTensorMode."""
    layer, (s, h) = LAYERS[name]().to("meta"), (x.to("meta") for x in states(name))
    for query, keys, real in ((s, h, REAL), (s[0], h[0], REAL[0])):
        out, attn = layer.attend(query, keys, padding=real.to("meta"))
        assert out.shape == (*query.shape[:-1], D_KEY)
        assert attn.entropy().shape == attn.uniform().entropy().shape == query.shape[:-1]
    layer = LAYERS[name]()
    with FakeTensorMode(allow_non_fake_inputs=True):
        query, keys = torch.randn(s.shape, dtype=s.dtype), torch.randn(h.shape, dtype=h.dtype, requires_grad=True)
        layer(query, keys, padding=torch.ones(B, S).bool()).sum().backward()
        assert keys.grad is not None


@pytest.mark.parametrize("dims", [(0, 0, 0), (0, None, None), (None, 0, None), (None, None, 0)])
def test_vmap_gives_what_a_loop_gives(dims: tuple[int | None, ...]) -> None:
    layer, many = additive(), [random(3, B, 3, D_QUERY), random(3, B, S, D_KEY), random(3, B, S) > 0]
    inputs = [x if dim == 0 else x[0] for x, dim in zip(many, dims, strict=True)]

    def of(s: Tensor, h: Tensor, real: Tensor) -> Tensor:
        return layer(s, h, padding=real)

    want = [of(*(x[i] if dim == 0 else x for x, dim in zip(inputs, dims, strict=True))) for i in range(3)]
    torch.testing.assert_close(torch.vmap(of, dims)(*inputs), torch.stack(want))


def test_per_sample_gradients() -> None:
    layer, s, h = additive(), random(3, 3, D_QUERY), random(3, S, D_KEY)
    parameters = dict(layer.named_parameters())

    def loss(parameters: dict[str, Tensor], s: Tensor, h: Tensor) -> Tensor:
        return func.functional_call(layer, parameters, (s, h)).square().sum()

    got = torch.vmap(func.grad(loss), (None, 0, 0))(parameters, s, h)
    for i in range(3):
        want = torch.autograd.grad(layer(s[i], h[i]).square().sum(), list(parameters.values()))
        torch.testing.assert_close(tuple(got[name][i] for name in parameters), want)


@pytest.mark.parametrize("name", ["additive", "general"])
def test_a_map_outlives_the_optimisers_step(name: str) -> None:
    layer, (s, h) = LAYERS[name](), states(name)
    context, attn = layer.attend(s, h)
    context.sum().backward()
    torch.optim.SGD(layer.parameters(), lr=1.0).step()
    torch.testing.assert_close(attn.to_dense() @ h, context)
    assert not torch.allclose(layer(s, h), context)


@pytest.mark.parametrize("name", LAYERS)
def test_trap_03_an_inverted_mask_is_noticed_where_the_layer_is_called(name: str) -> None:
    layer, (s, h) = LAYERS[name](), states(name)
    blocked = torch.ones(B, 3, 3).triu(1).bool()
    for call in (layer, layer.attend):
        with pytest.warns(UserWarning, match="True means may attend") as caught:
            call(s, h[:, :3], mask=blocked)
        assert caught[0].filename == __file__
    assert torch.equal(layer(s, h[:, :3], mask=~blocked), layer(s, h[:, :3], mask=masks.causal()))  # (B, T, S)


@pytest.mark.parametrize("name", LAYERS)
def test_exported_layers_give_the_same(name: str) -> None:
    layer, (s, h) = LAYERS[name](), states(name)
    arguments = {"padding": REAL}
    exported = torch.export.export(layer, (s, h), arguments).module()
    assert torch.equal(exported(s, h, **arguments), layer(s, h, **arguments))
