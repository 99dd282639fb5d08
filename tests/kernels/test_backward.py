"""Backward passes through a map: what they keep and cost, and the ways in which PyTorch takes them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, func, nn

from clearhead import SoftmaxMap, masks, record, reference
from clearhead.kernels import tiles
from clearhead.maps import AttentionMap
from clearhead.nn import Attention
from clearhead.testing import Allocations

from .small_maps import KINDS, D, S, entropy, few, qk, random

# --- memory and work ---------------------------------------------------------------------------------------


def _peaks(n: int, read: Callable[[AttentionMap], Tensor], rule: masks.MaskRule | None = None) -> tuple[int, int]:
    """Largest tensor and peak of one step, in bytes."""
    q, k = (torch.randn(1, heads, n, 8).requires_grad_() for heads in (4, 2))
    with Allocations() as allocations:
        read(SoftmaxMap(q, k, mask=rule)).square().sum().backward()
    assert q.grad is not None
    assert q.grad.abs().sum() > 0
    return allocations.largest, allocations.peak


TILE = 4 * tiles.TILE_ELEMENTS


@pytest.mark.parametrize("name", ["entropy", "received", "@", "pick", "mass", "lse", "statistics"])
def test_trap_10_no_quadratic_memory(name: str) -> None:
    """2,048 tokens, four heads: all weights are 67 MB, and a dense step holds several such tensors."""
    reads: dict[str, Callable[[Any], Tensor]] = {
        "entropy": lambda m: m.entropy(),
        "received": lambda m: m.received(),
        "@": lambda m: m @ torch.ones(2048, 1).cumsum(0),
        "pick": lambda m: m.diagonal(-1),
        "mass": lambda m: m.mass([0, 1]),
        "lse": lambda m: m.lse,
        "statistics": lambda m: m.statistics().distance,
    }
    biggest, peak = _peaks(2048, reads[name], masks.sliding_window(512))
    assert biggest <= TILE < 2048 * 2048 * 4
    assert peak <= 8 * TILE


def test_memory_grows_with_n_and_not_with_its_square() -> None:
    (_, one), (_, two) = (_peaks(n, lambda m: m.entropy(), masks.sliding_window(64)) for n in (1024, 2048))
    assert two <= 2.2 * one


def test_an_entropy_penalty_on_a_layer_of_4096_tokens_trains() -> None:
    """Dense, the weights of one step are 268 MB, and its backward pass holds several such tensors."""
    torch.manual_seed(0)
    layer, x = Attention(16, 16, 4096, num_heads=4, num_kv_heads=2, is_causal=True), torch.randn(1, 4096, 16)
    optimiser, losses = torch.optim.Adam(layer.parameters(), lr=0.05), []
    with Allocations() as allocations:
        for _ in range(2):
            _, attn = layer.attend(x)
            loss = attn.entropy().mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            losses.append(loss.item())
    assert losses[1] < 0.99 * losses[0]
    assert allocations.largest <= TILE < 4096 * 4096  # a byte for each pair of one head
    assert allocations.peak <= 8 * TILE < 4 * 4096 * 4096 * 4


def test_the_gradients_of_a_recorded_models_entropy_are_those_of_its_own_eager_weights(recomputed: None) -> None:
    """GPT-2 of the transformers library."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    ends = {"bos_token_id": 1, "eos_token_id": 2}
    config = transformers.GPT2Config(vocab_size=60, n_embd=16, n_layer=2, n_head=4, n_positions=32, **ends)
    model = transformers.GPT2LMHeadModel._from_config(config, attn_implementation="eager").double().eval()
    ids, parameters = torch.randint(60, (2, 20)), [*model.transformer.h[0].parameters()]
    eager = torch.stack([entropy(a).mean() for a in model(ids, output_attentions=True).attentions]).sum()
    want = torch.autograd.grad(eager, parameters)
    model.set_attn_implementation("sdpa")
    with record(model, detach=False) as recording:
        model(ids)
    ours = torch.stack([attn.entropy().mean() for attn in recording]).sum()
    torch.testing.assert_close(torch.autograd.grad(ours, parameters), want, rtol=1e-9, atol=1e-14)


def test_the_gradient_of_one_rows_sum_computes_the_rows_of_one_block_again(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[slice] = []
    scored = SoftmaxMap._scores

    def count(self: Any, rows: slice, cols: Any) -> Tensor:
        computed.append(rows)
        return scored(self, rows, cols)

    q, k = (random(1, 2, 200, 4).requires_grad_() for _ in range(2))
    with tiles.tile_size(20, 50), few(-1):
        lse = SoftmaxMap(q, k).lse
        monkeypatch.setattr(SoftmaxMap, "_scores", count)
        lse[..., 70].sum().backward()
    assert {(rows.start, rows.stop) for rows in computed} == {(60, 80)}


def test_a_result_keeps_its_map_no_longer_than_itself(recomputed: None) -> None:
    """No cycle: the last reference frees them, without the collector."""
    gc.disable()
    try:
        attn = SoftmaxMap(*qk())
        found, alive = attn.statistics(), weakref.ref(attn)
        found.entropy.sum().backward()
        del attn, found
        assert alive() is None
    finally:
        gc.enable()


# --- where gradients are taken -----------------------------------------------------------------------------


def _loss(q: Tensor, k: Tensor, **how: Any) -> Tensor:
    attn = SoftmaxMap(q, k, **(how or {"mask": masks.causal()}))
    return (attn.entropy() * attn.mass(0)).sum() + attn.received().square().sum()


def _dense_loss(q: Tensor, k: Tensor, **how: Any) -> Tensor:
    a = reference.weights(q, k, **(how or {"mask": reference.causal(q.shape[-2], k.shape[-2])}))
    return (entropy(a) * a[..., 0]).sum() + a.sum(-2).square().sum()


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_gradients_keep_the_tiles(kind: str, recomputed: None) -> None:
    def twice(loss: Callable[..., Tensor], how: dict[str, Any]) -> tuple[Tensor, ...]:
        q, k = qk()
        first = torch.autograd.grad(loss(q, k, **how), (q, k), create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in first), (q, k))

    ours, textbook = (how or {"scale": 0.5} for how in KINDS[kind])
    with tiles.tile_size(4, 3):
        torch.testing.assert_close(twice(_loss, ours), twice(_dense_loss, textbook), rtol=1e-10, atol=1e-12)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # PyTorch's, about itself
def test_torch_func_sees_the_tiles(recomputed: None) -> None:
    q, k = (x.detach() for x in qk())
    for take in (func.grad, lambda of: func.jacfwd(of)):
        torch.testing.assert_close(take(lambda q: _loss(q, k))(q), take(lambda q: _dense_loss(q, k))(q))
    held = q.clone().requires_grad_()
    entropies = SoftmaxMap(held, k)
    got = func.grad(lambda c: (c * entropies.entropy()).sum())(torch.ones(()).double())
    torch.testing.assert_close(got, entropy(reference.weights(q, k)).sum())


def test_autocast_rounds_nothing(recomputed: None) -> None:
    def gradient(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        attn = SoftmaxMap(q, k, mask=masks.causal())
        loss = attn.entropy().square().sum() + (attn @ k).square().sum() + attn.lse.sum()
        return torch.autograd.grad(loss, (q, k))

    q, k = (random(2, n, 4).float().requires_grad_() for n in (9, 13))
    want = gradient(q, k)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = gradient(q, k)
    assert all(map(torch.equal, got, want))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # PyTorch's, about itself
@pytest.mark.filterwarnings("ignore:.*of a Tensor that is not a leaf:UserWarning")
def test_a_compiled_step_breaks_the_graph_and_keeps_no_tile(recomputed: None) -> None:
    torch._dynamo.reset()
    held: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        held.append(tensor.numel())
        return tensor

    q, k = (random(1, 2, 100, 4).requires_grad_() for _ in range(2))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = torch.compile(lambda q, k: SoftmaxMap(2 * q, k).entropy().sum(), backend="aot_eager")(q, k)
    assert 0 < max(held) < 100 * 100
    want = entropy(reference.weights(2 * q, k)).sum()
    torch.testing.assert_close(torch.autograd.grad(loss, (q, k)), torch.autograd.grad(want, (q, k)))


def test_a_hook_on_the_queries_runs_once(recomputed: None) -> None:
    q, k = qk()
    ran: list[Tensor] = []
    doubled = 2 * q
    doubled.register_hook(ran.append)
    SoftmaxMap(doubled, k).entropy().sum().backward()
    assert len(ran) == 1


def test_a_checkpointed_layer(recomputed: None) -> None:
    """Activation checkpointing around it: what the layer computes again is what the gradient is taken of."""
    layer = nn.Linear(D, D).double()

    def run(q: Tensor, k: Tensor) -> Tensor:
        return _loss(layer(q), layer(k))

    q, k = qk()
    got = torch.autograd.grad(torch.utils.checkpoint.checkpoint(run, q, k, use_reentrant=False), (q, k))
    torch.testing.assert_close(got, torch.autograd.grad(_dense_loss(layer(q), layer(k)), (q, k)))


def test_what_was_overwritten_before_the_backward_pass_is_noticed(recomputed: None) -> None:
    for which in range(3):
        tensors = [2 * x for x in (*qk(), random(S, 2).requires_grad_())]
        out = (SoftmaxMap(*tensors[:2]) @ tensors[2]).sum()
        tensors[which].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.backward()
