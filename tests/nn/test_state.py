"""What a layer keeps: its weights and nothing else, whatever the context; and what can be done with it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from clearhead.nn import CausalAttention, MultiHeadAttention, MultiHeadAttentionWrapper
from clearhead.testing import Allocations

Rung, Tokens = Callable[..., nn.Module], Callable[..., Tensor]
EVERY = ("simple", "raw", "linear", "causal", "wrapper", "multi-head")
LONG = 131_072


@pytest.mark.parametrize("kind", [CausalAttention, MultiHeadAttention, MultiHeadAttentionWrapper])
def test_trap_10_a_long_context_costs_nothing(kind: type[nn.Module]) -> None:
    """32 layers: a mask of one of them as a buffer would be 17 GB in bytes."""
    heads = {} if kind is CausalAttention else {"num_heads": 4}
    with Allocations() as allocations:
        layers = nn.ModuleList(kind(64, 64, LONG, 0.1, **heads) for _ in range(32))
    weights = sum(p.numel() * p.element_size() for p in layers.parameters())
    assert allocations.peak - weights < 10e6
    assert sum(t.numel() * t.element_size() for t in layers.state_dict().values()) == weights
    assert not list(layers.buffers())


def test_trap_10_the_last_rung_makes_no_quadratic_tensor() -> None:
    layer = MultiHeadAttention(16, 16, 4096, 0.0, num_heads=2)
    with torch.no_grad(), Allocations() as allocations:
        layer(torch.ones(1, 4096, 16))
    assert allocations.largest < 4096 * 4096 / 8


@pytest.mark.parametrize("name", ["causal", "wrapper", "multi-head"])
def test_checkpoints_with_a_mask_load(rung: Rung, tokens: Tokens, name: str) -> None:
    """Others keep the mask as a buffer in every layer."""
    trained, layer = rung(name), rung(name)
    for weight in trained.parameters():
        weight.data += 0.1
    saved = trained.state_dict()
    for prefix in ["heads.0.", "heads.1."] if name == "wrapper" else [""]:
        saved[f"{prefix}mask"] = torch.ones(7, 7).triu(1)
    names = set(saved)
    layer.load_state_dict(saved)
    assert torch.equal(layer(tokens()), trained(tokens()))
    inside = nn.Sequential(nn.Identity(), rung(name))
    inside.load_state_dict({f"1.{key}": value for key, value in saved.items()})
    assert torch.equal(inside(tokens()), trained(tokens()))
    assert set(saved) == names  # the caller's own is as it was
    with pytest.raises(RuntimeError, match=r"Unexpected key.*masks"):
        layer.load_state_dict(saved | {"masks": torch.ones(1)})


@pytest.mark.parametrize("name", EVERY)
def test_copies_give_the_same(rung: Rung, tokens: Tokens, name: str) -> None:
    layer, x = rung(name), tokens()
    for same in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(same(x), layer(x))


@pytest.mark.parametrize("name", EVERY)
@torch.no_grad()
def test_exported_and_compiled_layers_give_the_same(rung: Rung, tokens: Tokens, name: str) -> None:
    layer, x = rung(name, dtype=torch.float32), tokens(dtype=torch.float32)
    exported = torch.export.export(layer, (x,)).module()
    torch.testing.assert_close(exported(x), layer(x), atol=1e-6, rtol=0)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), layer(x), atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", EVERY)
@torch.no_grad()
def test_autocast_converts_the_dtype_itself(rung: Rung, tokens: Tokens, name: str) -> None:
    layer, x = rung(name, dtype=torch.float32), tokens(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out, attn = layer.attend(x)
        layer(x.bfloat16())
    torch.testing.assert_close(out.float(), layer(x), atol=0.05, rtol=0.02)
    assert attn.dtype == torch.float32


@pytest.mark.filterwarnings("ignore:.*performance drop")  # PyTorch's, about its own kernel
@pytest.mark.parametrize("name", EVERY)
def test_vmap_gives_the_same(rung: Rung, tokens: Tokens, name: str) -> None:
    layer, x = rung(name), tokens(3, 2, 7, 5)
    torch.testing.assert_close(torch.func.vmap(layer)(x), torch.stack([layer(one) for one in x]), atol=1e-12, rtol=0)
