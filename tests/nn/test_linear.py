"""LinearAttention: heads as in MultiHeadAttention, weights of its own, and a state instead of a cache."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from clearhead import ShapeError, reference
from clearhead.maps import LinearMap
from clearhead.nn import LinearAttention, LinearState, MultiHeadAttention
from clearhead.testing import Allocations

B, T, D_IN, D_OUT, H = 2, 9, 5, 6, 2


def layer(*, causal: bool = True, bias: bool = True) -> LinearAttention:
    torch.manual_seed(0)
    return LinearAttention(D_IN, D_OUT, H, bias, is_causal=causal).double()


def tokens(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(shape or (B, T, D_IN), generator=generator, dtype=torch.float64)


def by_the_textbook(of: LinearAttention, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Head after head; output and weights."""
    width, heads, weights = D_OUT // H, [], []
    for head in range(H):
        part = slice(head * width, (head + 1) * width)
        q, k, v = (W(x)[..., part] for W in (of.W_query, of.W_key, of.W_value))
        weights.append(reference.linear_weights(q, k, mask=mask))
        heads.append(weights[-1] @ v)
    return of.out_proj(torch.cat(heads, -1)), torch.stack(weights, 1)


@pytest.mark.parametrize("causal", [False, True])
def test_equals_a_loop_over_heads(causal: bool) -> None:
    of, x = layer(causal=causal), tokens()
    out, attn = of.attend(x)
    want, weights = by_the_textbook(of, x, reference.causal(T, T) if causal else None)
    torch.testing.assert_close(out, want, rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(attn.to_dense(), weights, rtol=1e-13, atol=1e-15)
    assert torch.equal(of(x), out)


def test_one_sequence_is_a_batch_of_one() -> None:
    of, x = layer(), tokens()
    out, attn = of.attend(x[0])
    torch.testing.assert_close(out, of(x)[0])
    assert isinstance(attn, LinearMap)
    assert attn.shape == (H, T, T)
    torch.testing.assert_close(attn.to_dense(), of.attend(x)[1].to_dense()[0])


@pytest.mark.parametrize("causal", [False, True])
def test_padded_tokens_are_as_if_they_were_not_there(causal: bool) -> None:
    of, x = layer(causal=causal), tokens()
    real = torch.arange(T) >= torch.tensor([[0], [4]])
    out = of(x, padding=real)
    torch.testing.assert_close(out[0], of(x[0]))
    torch.testing.assert_close(out[1, 4:], of(x[1, 4:]))
    torch.testing.assert_close(of(x[1], padding=real[1]), out[1])


@pytest.mark.parametrize("pieces", [[1] * T, [5, 1, 3]])
def test_generation_with_a_state_gives_what_the_whole_text_gives(pieces: list[int]) -> None:
    of, x, state = layer(), tokens(), LinearState()
    steps = [of(part, state=state) for part in x.split(pieces, 1)]
    torch.testing.assert_close(torch.cat(steps, 1), of(x), rtol=1e-13, atol=1e-14)
    assert state.nbytes == B * H * 3 * 4 * 8  # whatever the length
    assert state.tokens == T


def test_gradcheck() -> None:
    of, x = layer(), tokens(1, 4, D_IN).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, *_: of(x), (x, *of.parameters()))


def test_weights_load_from_multi_head_attention_and_the_function_is_another() -> None:
    torch.manual_seed(0)
    softmax = MultiHeadAttention(D_IN, D_OUT, T, 0.0, H, qkv_bias=True).double()
    of = layer()
    of.load_state_dict(softmax.state_dict())
    assert ((of(tokens()) - softmax(tokens())).abs() > 1e-3).any()


def test_memory_grows_with_the_text_and_not_with_its_square() -> None:
    def peak(n: int) -> int:
        of, x = LinearAttention(8, 8, 2), torch.randn(1, n, 8)
        with Allocations() as allocations:
            of(x).sum().backward()
        return allocations.peak

    assert peak(4096) <= 2.1 * peak(2048)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((5, 6, 4), r"LinearAttention\(d_out=6, num_heads=4\): 4 heads do not divide a width of 6"),
        ((5, 6, 0), r"LinearAttention\(num_heads=0\): expected an integer >= 1"),
    ],
)
def test_sizes_that_do_not_fit(arguments: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        LinearAttention(*arguments)


def test_bad_input_names_shapes() -> None:
    with pytest.raises(ShapeError, match=r"LinearAttention got x = .*width of 5"):
        layer()(tokens(2, 3, 4))
    with pytest.raises(ShapeError, match=r"padding\(keys=...\): expected shape \(2, 9\)"):
        layer()(tokens(), padding=torch.ones(2, 8).bool())
    state = LinearState()
    layer()(tokens(), state=state)
    with pytest.raises(ShapeError, match=r"A state belongs to one layer and one batch: pass a new LinearState"):
        layer()(tokens(3, 1, D_IN), state=state)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [(B, T, D_IN), (T, D_IN)])
def test_on_the_meta_device_there_are_shapes(shape: tuple[int, ...], causal: bool) -> None:
    x, real = torch.randn(shape, device="meta"), torch.ones(shape[:-1], dtype=torch.bool, device="meta")
    out, attn = layer(causal=causal).float().to("meta").attend(x, padding=real)
    assert out.shape == (*shape[:-1], D_OUT)
    assert attn.entropy().shape == attn.uniform().entropy().shape == (*shape[:-2], H, T)
    with FakeTensorMode():
        assert LinearAttention(D_IN, D_OUT, H, is_causal=causal)(torch.randn(shape)).shape == out.shape


def test_vmap_gives_what_a_loop_gives() -> None:
    of, x, real = layer(), tokens(3, B, T, D_IN), torch.arange(T) >= torch.arange(3)[:, None, None].expand(3, B, 1)
    got = torch.vmap(lambda x, real: of(x, padding=real))(x, real)
    torch.testing.assert_close(got, torch.stack([of(x[i], padding=real[i]) for i in range(3)]))
    torch.testing.assert_close(torch.vmap(of)(x[0]), of(x[0]))


def test_an_exported_layer_gives_the_same() -> None:
    of, x = layer(), tokens()
    assert torch.equal(torch.export.export(of, (x,)).module()(x), of(x))
