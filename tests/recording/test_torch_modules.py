"""Seam 2 beside the other seams: each call is seen once, nothing is changed, and nothing is left behind."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead.errors import RecordingError
from clearhead.recording import record, torch_modules

from .torch_built import GRADS, B, E, H, Mixed, Own, T, built, close, encoder, kernels, padded, randn, recorded

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:.*enable_nested_tensor")


@pytest.mark.parametrize("grad", GRADS)
@pytest.mark.parametrize("padding", [None, padded(T)])
def test_trap09_every_call_of_a_mixed_model_is_seen_once_and_in_order(grad, padding):
    model = built(Mixed)
    with grad(), kernels() as ran:
        recording = recorded(model, randn(B, T, E), padding)
    assert recording.paths == ["first", "encoder.layers.0.self_attn", "encoder.layers.1.self_attn", "", "last"]
    assert len(ran) == 6 * (grad is not torch.enable_grad)
    assert recording.layers == [0, 1, 2, 3, 4]
    with record(model, layers=[2]) as one, grad():
        model(randn(B, T, E), padding)
    assert one.paths == ["encoder.layers.1.self_attn"]
    assert torch.equal(one[0].to_dense(), recording[2].to_dense())


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_a_hugging_face_model_and_a_multihead_attention_in_one_model(implementation):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=2, n_embd=E, n_head=H, vocab_size=20, n_positions=T)
    config._attn_implementation = implementation

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gpt, self.pool = transformers.GPT2Model(config), nn.MultiheadAttention(E, H, batch_first=True)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.gpt(ids).last_hidden_state
            return self.pool(x[:, -1:], x, x)[0]

    with torch.no_grad():
        recording = recorded(Both().eval(), torch.arange(T)[None])
    assert recording.paths == ["gpt.h.0.attn", "gpt.h.1.attn", "pool"]
    assert recording[2].shape == (1, H, 1, T)


class Pool(nn.Module):
    """Attention pooling as OpenAI's CLIP writes it: separate weights, and the function itself."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.c = (nn.Linear(E, E) for _ in range(4))

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        bias = torch.cat([self.q.bias, self.k.bias, self.v.bias])
        weights = None, bias, None, None, False, 0.0, self.c.weight, self.c.bias
        separate = {f"{name}_proj_weight": getattr(self, name).weight for name in "qkv"}
        x, mask = x.transpose(0, 1), torch.arange(T) > 3
        return F.multi_head_attention_forward(
            x[:1], x, x, E, H, *weights, use_separate_proj_weight=True, attn_mask=mask[None], **separate
        )


def test_a_function_that_is_called_without_its_module_is_seen_too():
    model, x = built(Pool), randn(B, T, E)
    recording = recorded(nn.Sequential(model), x)
    assert recording.paths == ["0"]
    q, k = (layer(x).unflatten(-1, (H, -1)).transpose(1, 2) for layer in (model.q, model.k))
    scores = (q[:, :, :1] @ k.mT / 2).masked_fill(torch.arange(T) > 3, -torch.inf)
    assert close(recording[0].to_dense(), scores.softmax(-1))


def test_a_module_of_somebody_elses_in_a_layer_of_pytorchs_has_its_own_path_and_masks():
    layer = built(nn.TransformerDecoderLayer, E, H, 24, 0.0)
    layer.self_attn, x = built(Pool), randn(T, T, E)
    recording = recorded(layer, x, x, tgt_mask=torch.eye(T).bool())
    assert recording.paths == ["self_attn", "multihead_attn"]
    assert (recording[0].to_dense()[..., 4:] == 0).all()
    assert recording[0].shape == (T, H, 1, T)


class OwnBlock(nn.TransformerEncoderLayer):
    """A subclass with an attention of its own: only off the fast path."""

    def _sa_block(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return Own.forward(self, x)


@pytest.mark.parametrize("grad", GRADS)
def test_an_encoder_layer_with_an_attention_of_its_own(grad):
    model = built(nn.TransformerEncoder, OwnBlock(E, H, 24, 0.0, batch_first=True), 2, enable_nested_tensor=False)
    before = vars(OwnBlock)["_sa_block"]
    with grad():
        recording = recorded(model, randn(B, T, E))
    fast = grad is not torch.enable_grad
    assert recording.paths == [f"layers.{i}" + ".self_attn" * fast for i in range(2)]
    assert vars(OwnBlock)["_sa_block"] is before
    assert recording[0].to_dense()[..., 0, 1:].any() == fast  # its own is causal


def test_a_forward_that_is_called_directly_has_its_modules_path():
    class Direct(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = encoder(layers=1).layers[0]
            self.attn = self.layer.self_attn

        def forward(self, x: Tensor) -> Tensor:
            x = self.layer.forward(x)
            return self.attn.forward(x, x, x)[0]

    model, x = Direct().eval(), randn(B, T, E)
    for grad in GRADS:
        with grad():
            assert recorded(model, x).paths == ["layer.self_attn"] * 2


def test_a_kernel_that_somebody_else_calls_is_an_error_and_not_a_guess():
    class Private(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.m = built(nn.MultiheadAttention, E, H)

        def forward(self, x: Tensor) -> Tensor:
            weights = self.m.in_proj_weight, self.m.in_proj_bias, self.m.out_proj.weight, self.m.out_proj.bias
            return torch._native_multi_head_attention(x, x, x, E, H, *weights)[0]

    model = Private()
    with (
        torch.no_grad(),
        pytest.raises(RecordingError, match=r"not called by nn\.MultiheadAttention\.forward"),
        record(model),
    ):
        model(randn(B, T, E))


def test_somebody_elses_function_mode_switches_the_fast_path_off_as_without_us():
    class Nothing(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    model, x = built(Mixed), randn(B, T, E)
    with torch.no_grad(), Nothing(), kernels() as ran:
        recording = recorded(model, x, padded(T))
    assert not ran
    assert recording.paths == ["first", "encoder.layers.0.self_attn", "encoder.layers.1.self_attn", "", "last"]


# --- other versions of PyTorch ------------------------------------------------------------------------------

PRIVATE = [
    (torch, "_transformer_encoder_layer_fwd"),
    (torch, "_native_multi_head_attention"),
    (F, "_in_projection_packed"),
    (F, "_in_projection"),
]


@pytest.mark.parametrize(("owner", "name"), PRIVATE, ids=[name for _, name in PRIVATE])
def test_a_pytorch_without_a_private_name_is_an_error_for_its_own_modules_alone(
    nano, ids, touched, monkeypatch, owner, name
):
    model, x = built(nn.MultiheadAttention, E, H), randn(T, B, E)
    monkeypatch.delattr(owner, name)
    before = touched()
    with pytest.raises(RecordingError, match=rf"PyTorch \d.* has no .*{name}.*version from 2\.6"):
        recorded_only(model, x, x, x)
    assert len(recorded_only(nano, ids)) == 3
    assert touched() == before


def recorded_only(model: nn.Module, *args: Any) -> Any:
    with record(model) as recording:
        model(*args)
    return recording


def test_attention_that_a_pytorch_computes_in_another_way_is_an_error_and_no_gap(monkeypatch):
    model, x = built(nn.MultiheadAttention, E, H), randn(T, B, E)
    monkeypatch.setattr(nn.MultiheadAttention, "forward", lambda self, q, k, v: (q.softmax(-1) @ k.mT @ v, None))
    with pytest.raises(RecordingError, match="computed attention in a way that clearhead does not see"):
        recorded_only(nn.Sequential(model, nn.Identity())[0], x, x, x)


def test_projections_that_a_pytorch_makes_in_another_way_are_an_error(monkeypatch):
    model, x = built(Pool), randn(B, T, E)
    monkeypatch.setattr(F, "multi_head_attention_forward", lambda *args, **kwargs: (args[0], None))
    with pytest.raises(RecordingError, match=r"made no q, k and v that clearhead sees"):
        recorded_only(model, x)


# --- nothing is changed, and nothing left behind ------------------------------------------------------------


@pytest.mark.parametrize("grad", GRADS)
@pytest.mark.parametrize("where", ["nowhere", "in the kernel", "while reading", "between layers"])
def test_trap02_everything_is_as_before_after_a_block_and_after_an_exception(touched, monkeypatch, grad, where):
    model = built(Mixed)
    x = randn(B, T, E if where != "in the kernel" else E + 1)
    if where == "while reading":
        monkeypatch.setattr("clearhead.recording.multihead._call", lambda *_: 1 / 0)
    if where == "between layers":
        monkeypatch.setattr(model.encoder.layers[1], "forward", lambda *_, **__: 1 / 0)
    model.first = nn.Identity()
    before, modules = touched(), {name: dict(vars(module)) for name, module in model.named_modules()}
    with grad(), contextlib.ExitStack() as block:
        if where != "nowhere":
            block.enter_context(pytest.raises((ZeroDivisionError, RuntimeError, AssertionError)))
        block.enter_context(record(model))
        model(x, padded(T))
    assert torch_modules._running.get() is torch_modules._projected.get() is None
    assert touched() == before
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == modules


def test_trap02_nothing_is_alive_after_the_block_but_what_the_recording_holds():
    model, x = encoder(layers=2, nested=True), randn(B, T, E)
    for grad in GRADS:
        with grad(), record(model) as recording:
            model(x, src_key_padding_mask=padded(T))
        assert not any(t.requires_grad for attn in recording for t in (attn.q, attn.k, attn.v))
        real = B * T * (2 if grad is torch.enable_grad else 1)  # keys and queries; those of a nested tensor are one
        assert recording.nbytes == 2 * (3 * x.nbytes + real)  # q, k, v and the real tokens of two layers
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("training", [True, False])
def test_detach_false_keeps_the_graph_and_trains(training):
    model, x = encoder(layers=2).train(training), randn(B, T, E)
    with record(model, detach=False) as recording:
        model(x, src_key_padding_mask=padded(T))
    recording[1].entropy().mean().backward()
    for layer in model.layers:
        assert layer.self_attn.in_proj_weight.grad.abs().sum() > 0


@pytest.mark.parametrize("shape", [(0, T, E), (1, 1, E), (2, 65, E)])
@pytest.mark.parametrize("grad", GRADS)
def test_trap22_no_batch_one_token_and_odd_lengths(shape, grad):
    model, x = encoder(), randn(*shape)
    with grad():
        recording = recorded(model, x)
    assert [attn.to_dense().shape for attn in recording] == [(shape[0], H, shape[1], shape[1])] * 2


# --- forwards that somebody has replaced ------------------------------------------------------------------------


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attn(x, x, x)[0]


@pytest.mark.parametrize("make", [SelfAttention, lambda: nn.TransformerEncoderLayer(16, 2, 16, batch_first=True)])
@pytest.mark.parametrize("grad", [torch.no_grad, torch.enable_grad])
def test_trap02_a_module_whose_forward_was_replaced_keeps_its_fast_path_and_that_forward(make, grad):
    torch.manual_seed(0)
    model, x = make().eval(), torch.randn(3, 5, 16)
    attention = model.attn if isinstance(model, SelfAttention) else model
    of_its_class = attention.forward
    attention.forward = moving = lambda *args, **kwargs: of_its_class(*args, **kwargs)  # as accelerate moves tensors
    with grad():
        plain = model(x)
        with record(model) as recording, record(model) as inner:
            out = model(x)
    assert torch.equal(out, plain)
    assert vars(attention)["forward"] is moving
    assert not torch_modules._own
    with grad(), record(again := copy.deepcopy(model)) as expected:
        del vars(again.attn if isinstance(model, SelfAttention) else again)["forward"]
        again(x)
    for maps in (recording, inner):
        assert maps.paths == expected.paths
        assert torch.equal(maps[0].to_dense(), expected[0].to_dense())
