"""Linear attention: its three forms are one function, its state carries on, and its product takes O(n)."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from clearhead import DTypeError, RecordingError, ShapeError, reference
from clearhead.functional import LinearState, linear_attention
from clearhead.kernels.linear import phi
from clearhead.maps import LinearMap
from clearhead.testing import Allocations, assert_close

LINEAR = json.loads((Path(__file__).parents[1] / "data" / "defs.json").read_text())["linear"]
B, H, G, N, D, DV = 2, 4, 2, 37, 5, 3


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=torch.float64)


def qkv(T: int = N, S: int = N) -> list[Tensor]:
    sizes = ((H, T, D), (G, S, D), (G, S, DV))
    return [random(B, *size, seed=i).requires_grad_() for i, size in enumerate(sizes)]


def dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    return reference.linear_weights(q, k, mask=mask) @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)


def test_the_feature_map() -> None:
    x = torch.tensor([float(x) for x in LINEAR["phi"]], dtype=torch.float64)
    torch.testing.assert_close(phi(x), torch.tensor(list(LINEAR["phi"].values()), dtype=torch.float64))
    torch.testing.assert_close(phi(x), reference.phi(x))
    assert phi(torch.tensor(-50.0)).item() == pytest.approx(math.exp(-50), rel=1e-6)  # elu + 1 has lost it all


# --- one function in three forms ---------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 2, 7, 36, 37, 128])
def test_requirement_35_recurrent_chunked_and_parallel_forms_are_the_textbooks(chunk: int) -> None:
    q, k, v = qkv()
    out, attn = linear_attention(q, k, v, is_causal=True, chunk=chunk)
    want = dense(q, k, v, reference.causal(N, N))
    torch.testing.assert_close(out, want, rtol=0, atol=16 * LINEAR["causal_vs_recurrent"])
    torch.testing.assert_close(attn @ v, want, rtol=0, atol=16 * LINEAR["causal_vs_recurrent"])
    ours, theirs = (torch.autograd.grad(o.square().sum(), (q, k, v)) for o in (out, want))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)


def test_requirement_35_sums_first_or_weights_first() -> None:
    q, k, v = qkv(T=11)
    out, attn = linear_attention(q, k, v)
    torch.testing.assert_close(out, dense(q, k, v), rtol=0, atol=16 * LINEAR["kernel_vs_reordered"])
    torch.testing.assert_close(attn.to_dense(), reference.linear_weights(q, k), rtol=1e-13, atol=1e-15)


def test_token_by_token_by_hand() -> None:
    """S += φ(k) vᵀ, z += φ(k), out = φ(q) S / φ(q) z."""
    q, k, v = (x.detach()[0, 0] for x in qkv())
    S, z = torch.zeros(D, DV, dtype=torch.float64), torch.zeros(D, dtype=torch.float64)
    out, _ = linear_attention(q, k, v, is_causal=True)
    for t in range(N):
        S, z = S + torch.outer(phi(k[t]), v[t]), z + phi(k[t])
        torch.testing.assert_close(out[t], phi(q[t]) @ S / (phi(q[t]) @ z), rtol=1e-13, atol=1e-14)


def test_it_is_not_softmax_attention() -> None:
    q, k = random(8, 4), random(8, 4)
    apart = LinearMap(q, k).to_dense() - reference.weights(q, k)
    assert float(apart.abs().max()) > 0.1
    assert LINEAR["differs_from_softmax"] > 0.1


def test_the_future_changes_nothing() -> None:
    q, k, v = (x.detach() for x in qkv())
    before, _ = linear_attention(q, k, v, is_causal=True, chunk=8)
    k[:, :, 20:], v[:, :, 20:] = 7.0, -100.0
    assert torch.equal(linear_attention(q, k, v, is_causal=True, chunk=8)[0][:, :, :20], before[:, :, :20])


# --- a state -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pieces", [[1] * N, [20, 1, 1, 1, 14], [37]])
def test_a_state_goes_on_where_the_last_call_ended(pieces: list[int]) -> None:
    q, k, v = qkv()
    whole, whole_attn = linear_attention(q, k, v, is_causal=True)
    state, outs = LinearState(), []
    for parts in zip(*(x.split(pieces, 2) for x in (q, k, v)), strict=True):
        out, attn = linear_attention(*parts, is_causal=True, state=state, chunk=4)
        outs.append(out)
        here = slice(state.tokens - parts[0].shape[2], state.tokens)
        torch.testing.assert_close(attn.to_dense(), whole_attn.tile(here, here), rtol=1e-13, atol=1e-15)
    torch.testing.assert_close(torch.cat(outs, 2), whole, rtol=1e-13, atol=1e-14)
    ours, theirs = (torch.autograd.grad(o.square().sum(), (q, k, v)) for o in (torch.cat(outs, 2), whole))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)


def test_a_state_is_of_one_size_and_rows_leave_the_past_its_share() -> None:
    q, k, v = (x.detach() for x in qkv())
    state = LinearState()
    linear_attention(q, k, v, is_causal=True, state=state)
    size = B * G * D * (DV + 1) * 8
    assert (state.tokens, state.nbytes) == (N, size)
    assert repr(state) == "LinearState(37 tokens in 640 B)"
    _, attn = linear_attention(q, k, v, is_causal=True, state=state)
    assert state.nbytes == size
    assert (attn.to_dense().sum(-1) < 0.6).all()
    assert "a past: rows sum to less than 1" in repr(attn)
    state.reset()
    assert (state.tokens, state.nbytes) == (0, 0)


def test_a_state_without_a_causal_order_gathers_all_keys() -> None:
    q, k, v = (x.detach() for x in qkv())
    state = LinearState()
    for keys, values in zip(k.split(10, 2), v.split(10, 2), strict=True):
        out, _ = linear_attention(q, keys, values, state=state)
    torch.testing.assert_close(out, linear_attention(q, k, v)[0], rtol=1e-13, atol=1e-14)


def test_a_state_filled_in_inference_mode_goes_on_outside() -> None:
    q, k, v = qkv()
    first, last = (x.split([20, 17], 2) for x in (q, k)), v.split([20, 17], 2)
    (q0, q1), (k0, k1), (v0, v1) = *first, last
    state = LinearState()
    with torch.inference_mode():
        linear_attention(q0, k0, v0, is_causal=True, padding=torch.ones(B, 20) > 0, state=state)
    out, attn = linear_attention(q1, k1, v1, is_causal=True, state=state)
    torch.testing.assert_close(out, linear_attention(q, k, v, is_causal=True)[0][:, :, 20:], rtol=1e-13, atol=1e-14)
    out.sum().backward()
    attn.uniform().entropy()


def test_copies_of_a_state_go_on_by_themselves_and_detached_ones_without_a_graph() -> None:
    q, k, v = qkv(5, 5)
    state = LinearState()
    linear_attention(q, k, v, is_causal=True, state=state)
    twin, cut = copy.deepcopy(state), state.detach()
    outs = [linear_attention(q, 2 * k, v, is_causal=True, state=one)[0] for one in (state, twin, cut)]
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])
    gradients = [torch.autograd.grad(out.sum(), k, retain_graph=True)[0] for out in outs]
    assert torch.equal(gradients[0], gradients[1])
    assert not torch.allclose(gradients[0], gradients[2])
    assert (twin.tokens, cut.tokens, repr(LinearState().detach())) == (10, 10, "LinearState(0 tokens)")
    state.reset()
    assert (twin.tokens, state.tokens) == (10, 0)


def test_a_uniform_map_counts_the_keys_that_are_visible_and_those_of_the_past() -> None:
    q, k, v = (x.detach() for x in qkv(5, 5))
    k[:, :, 1] = -2000  # weighs 0, and may be seen
    seen = reference.causal(5, 5) & PADDING.bool()[:, None, None]
    want = (seen / seen.sum(-1, keepdim=True).clamp(min=1).double()).expand(B, H, 5, 5)
    torch.testing.assert_close(LinearMap(q, k, is_causal=True, padding=PADDING).uniform().to_dense(), want)
    state = LinearState()
    linear_attention(q, k, v, is_causal=True, padding=PADDING, state=state)  # 3 and 4 real keys
    _, attn = linear_attention(q, k, v, is_causal=True, state=state)
    want = reference.causal(5, 5) / (torch.tensor([[3], [4]]) + torch.arange(1, 6))[:, None, :, None].double()
    for part, rows in ((attn, slice(None)), (attn[1], 1), (attn[..., [3, 0], :], (slice(None), slice(None), [3, 0]))):
        torch.testing.assert_close(part.uniform().to_dense(), want.expand(B, H, 5, 5)[rows])
    with pytest.raises(ShapeError, match=r"uniform\(\): pass LinearMap\(…, past_keys=…\)"):
        LinearMap(q, k, past=phi(random(B, G, D))).uniform()


@pytest.mark.parametrize("index", [0, [1, 0], slice(1, 2)])
def test_a_part_of_a_map_with_a_past_is_that_part(index: int | slice | list[int]) -> None:
    q, k, _ = qkv()
    past = phi(random(B, G, D))
    padding = torch.arange(N) > torch.tensor([[3], [0]])
    whole = LinearMap(q, k, padding=padding, past=past)
    for _ in range(2):  # before and after the denominators are kept
        for part, want in ((whole[index], whole.to_dense()[index]), (whole[:, index], whole.to_dense()[:, index])):
            assert isinstance(part, LinearMap)
            torch.testing.assert_close(part.to_dense(), want, rtol=1e-13, atol=1e-15)
            torch.testing.assert_close(part @ torch.ones(N, 2), want.sum(-1)[..., None].expand(*want.shape[:-1], 2))
        q.requires_grad_(False), k.requires_grad_(False)


# --- gradients, and rows that see nothing ------------------------------------------------------------------

PADDING = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 0, 1, 1]])


@pytest.mark.parametrize("causal", [False, True])
def test_gradcheck(causal: bool) -> None:
    q, k, v = qkv(5, 5)
    past = phi(random(B, G, D)).requires_grad_()

    def of(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return linear_attention(q, k, v, is_causal=causal, padding=PADDING, chunk=2)[0]

    def of_map(q: Tensor, k: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
        attn = LinearMap(q, k, is_causal=causal, padding=PADDING, past=past)
        return attn.entropy(), attn @ torch.ones(5, 1, dtype=torch.float64)

    assert torch.autograd.gradcheck(of, (q, k, v))
    assert torch.autograd.gradcheck(of_map, (q, k, past))


def test_trap_04_a_row_that_sees_nothing_is_0_with_finite_gradients() -> None:
    q, k, v = qkv(5, 5)
    out, attn = linear_attention(q, k, v, is_causal=True, padding=PADDING)
    seen = reference.causal(5, 5) & PADDING.bool()[:, None, None]
    torch.testing.assert_close(out, dense(q, k, v, seen), rtol=1e-13, atol=1e-14)
    assert (out[0, :, :2] == 0).all()
    assert (attn.to_dense()[0, :, :2] == 0).all()
    gradients = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_a_row_whose_normaliser_is_0_is_0() -> None:
    q, k, v = qkv(5, 5)
    low = (k * 0 - 1e4).detach().requires_grad_()  # e^-10000 is 0 in any float
    out, attn = linear_attention(q, low, v, is_causal=True)
    assert (out == 0).all()
    assert (attn.to_dense() == 0).all()
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(out.sum(), (q, low, v)))


def test_trap_23_nan_in_padded_keys_and_values_reaches_nobody() -> None:
    q, k, v = (x.detach() for x in qkv(5, 5))
    want, _ = linear_attention(q, k, v, is_causal=True, padding=PADDING)
    k[0, :, :2], v[0, :, :2], k[1, :, 2], v[1, :, 2] = torch.nan, torch.nan, torch.inf, torch.nan
    out, attn = linear_attention(q, k, v, is_causal=True, padding=PADDING)
    assert torch.equal(out, want)
    assert (attn @ v).isfinite().all()
    assert attn.to_dense().isfinite().all()


def test_padding_of_one_sequence_has_one_dimension() -> None:
    x, real = random(4, 3), torch.tensor([0, 1, 1, 0])
    out, _ = linear_attention(x, x, x, padding=real)
    torch.testing.assert_close(out, linear_attention(x, x[1:3], x[1:3])[0])


LOW = [(-104, 0), (-45, -45), (-48, -48), (-52, -52), (-88, -10), (-600, -80)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("query", "key"), LOW)
def test_what_lies_far_below_0_is_as_exact_in_float32_as_anything(query: float, key: float, causal: bool) -> None:
    """A query's factor cancels; e^-104 and e^-52 · e^-52 are 0 in float32."""

    def read(dtype: torch.dtype) -> list[Tensor]:
        inputs = random(1, 9, 4) + query, random(1, 9, 4) + key, random(1, 9, 3)
        q, k, v = (x.float().to(dtype).requires_grad_() for x in inputs)  # the same numbers in both
        out, attn = linear_attention(q, k, v, is_causal=causal, chunk=4)
        gradients = torch.autograd.grad((out * torch.arange(1, 4)).square().sum(), (q, k, v))
        return [x.detach().double() for x in (out, attn @ v, attn.to_dense(), attn.entropy(), *gradients)]

    for single, exact in zip(read(torch.float32), read(torch.float64), strict=True):
        assert float((single - exact).abs().max()) <= 1e-5 * float(exact.abs().max())


# --- cost --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
def test_requirement_32_output_and_product_take_memory_that_grows_with_n(causal: bool) -> None:
    def peak(n: int) -> int:
        q, k, v = (torch.randn(1, 2, n, 8) for _ in range(3))
        with Allocations() as allocations:
            _, attn = linear_attention(q, k, v, is_causal=causal)
            attn @ v
            attn.mass([0, 5])
            attn[..., 7]
        return allocations.peak

    assert peak(8192) <= 2.1 * peak(4096)
    assert peak(8192) < 8192 * 8192  # a T×S tensor of one byte an entry


def test_a_product_shows_no_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = qkv()
    attn = LinearMap(q, k, is_causal=True)
    want = attn.to_dense()

    def refuse(self: LinearMap, rows: slice, cols: slice) -> Tensor:
        raise AssertionError("a product, a column and a mass need no tile")

    monkeypatch.setattr(LinearMap, "tile", refuse)
    torch.testing.assert_close(attn @ v, want @ v.repeat_interleave(H // G, 1), rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(attn[..., 3], want[..., 3], rtol=1e-13, atol=1e-15)
    torch.testing.assert_close(attn.mass([0, 4]), want[..., [0, 4]].sum(-1), rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("heads", [1, G, H])
def test_values_may_have_any_number_of_heads_that_divides(heads: int) -> None:
    q, k, _ = qkv()
    x = random(B, heads, N, 2)
    attn = LinearMap(q, k, is_causal=True)
    want = attn.to_dense() @ x.repeat_interleave(H // heads, 1)
    torch.testing.assert_close(attn @ x, want, rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(attn @ x[0], attn.to_dense() @ x[0].repeat_interleave(H // heads, 0))


# --- precision ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_as_precise_as_the_dense_formula(causal: bool, dtype: torch.dtype) -> None:
    q, k, v = (x.detach().to(dtype) for x in qkv(300, 300))
    out, _ = linear_attention(q, k, v, is_causal=causal)
    mask = reference.causal(300, 300) if causal else None
    exact, plain = (dense(q.to(d), k.to(d), v.to(d), mask) for d in (torch.float64, torch.float32))
    assert_close(out, exact, plain.to(dtype), terms=300 + D)


def test_half_precision_and_autocast_are_summed_in_float32() -> None:
    x = torch.zeros(1, 1, 4096, 1, dtype=torch.bfloat16)
    out, _ = linear_attention(x, x, x + 1, is_causal=True)
    assert out.dtype == torch.bfloat16
    assert (out == 1).all()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        state = LinearState()
        linear_attention(x.float(), x.float(), x.float() + 1, is_causal=True, state=state)
    assert state.sums is not None
    assert (state.sums == 4096).all()


# --- sizes and errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [(5, 4), (2, 5, 4), (2, 3, 5, 4), (2, 3, 0, 4), (0, 3, 5, 4), (1, 4)])
def test_every_rank_and_no_tokens(shape: tuple[int, ...], causal: bool) -> None:
    x = random(*shape).requires_grad_()
    out, attn = linear_attention(x, x, x, is_causal=causal)
    T = shape[-2]
    want = reference.linear_weights(x, x, mask=reference.causal(T, T) if causal else None)
    torch.testing.assert_close(out, want @ x)
    assert attn.to_dense().shape == want.shape
    assert torch.autograd.grad(out.sum(), x)[0].shape == shape


def test_no_keys_give_0() -> None:
    out, attn = linear_attention(random(2, 5, 4), random(2, 0, 4), random(2, 0, 3))
    assert out.shape == (2, 5, 3)
    assert (out == 0).all()
    assert attn.to_dense().shape == (2, 5, 0)


def test_an_overwritten_key_is_noticed() -> None:
    k = random(7, 3)
    attn = LinearMap(random(5, 3), k)
    k.zero_()
    for read in (attn.entropy, lambda: attn @ k):
        with pytest.raises(RecordingError, match="was overwritten in place"):
            read()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"state": {}}, DTypeError, r"linear_attention\(state=dict\): expected LinearState\(\)"),
        (
            {"is_causal": True},
            ShapeError,
            r"^linear_attention\(q=.*True\): expected as many queries as keys.*LinearState",
        ),
        ({"chunk": 0}, ShapeError, r"linear_attention\(chunk=0\): expected an integer >= 1"),
        ({"padding": torch.ones(2, 5).bool()}, ShapeError, r"padding\(keys=...\): expected shape \(2, 6\)"),
        ({"padding": [[1] * 6] * 2}, ShapeError, r"expected a bool or 0/1 tensor \(B, tokens\).* got list"),
        ({"k": random(2, 6, 4)}, ShapeError, r"linear_attention\(q=.*same last dimension"),
        ({"k": random(2, 6, 3).float()}, DTypeError, "one dtype"),
    ],
)
def test_bad_arguments_name_shapes(change: dict[str, object], error: type[Exception], message: str) -> None:
    arguments = {"q": random(2, 4, 3), "k": random(2, 6, 3), "v": random(2, 6, 2)} | change
    with pytest.raises(error, match=message):
        linear_attention(**arguments)  # type: ignore[arg-type]


def test_the_state_of_another_batch_is_refused() -> None:
    state = LinearState()
    linear_attention(random(2, 4, 3), random(2, 4, 3), random(2, 4, 3), state=state)
    with pytest.raises(ShapeError, match=r"holds a float64 tensor .* expected \(3, 1, 3, 4\).*pass a new LinearState"):
        linear_attention(random(3, 4, 3), random(3, 4, 3), random(3, 4, 3), state=state)
    with pytest.raises(ShapeError, match=r"past=.*expected \(2, 1, 3\), a sum for each feature"):
        LinearMap(random(2, 4, 3), random(2, 4, 3), past=random(2, 3))
    for past in (3, torch.ones(2, 1, 3).long(), random(2, 1, 3).to("meta")):
        with pytest.raises(DTypeError, match=r"LinearMap\(past=.*\): expected a float tensor on cpu, as q is"):
            LinearMap(random(2, 4, 3), random(2, 4, 3), past=past)  # type: ignore[arg-type]
