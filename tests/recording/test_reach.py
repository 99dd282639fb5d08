"""Models that attend through transformers' interface alone are told from all others, whatever is done to them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

pytest.importorskip("transformers")

from transformers import DynamicCache
from transformers.models.llama import modeling_llama

import clearhead
from clearhead.errors import RecordingError
from clearhead.recording import record, recorder
from clearhead.recording.reach import attends_by_interface_alone

from .architectures import build
from .generated import argument_of
from .tiny_models import text

Change: TypeAlias = "Callable[[Any, pytest.MonkeyPatch], None]"


@pytest.fixture
def llama() -> Any:
    return build("Llama", "sdpa")


def is_quiet(model: nn.Module) -> bool:
    return attends_by_interface_alone(list(model.modules()))


@pytest.mark.parametrize("name", ["Llama", "GPT-2", "BERT", "T5", "ViT"])
def test_models_of_the_interface_need_no_watching(name: str) -> None:
    assert is_quiet(build(name))


@pytest.mark.parametrize("name", ["Mixtral", "Bloom", "Falcon", "DeBERTa-v2", "XLNet", "MPNet"])
def test_models_that_write_a_softmax_are_watched(name: str) -> None:
    assert not is_quiet(build(name))


def test_gpt2_is_watched_where_it_upcasts_by_hand() -> None:
    model = build("GPT-2")
    model.transformer.h[1].attn.reorder_and_upcast_attn = True
    assert not is_quiet(model)


# --- what a user does to a model ----------------------------------------------------------------------------


class ByHand(nn.Module):
    """In the place of an attention module of Llama's."""

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
        return F.scaled_dot_product_attention(*3 * [hidden_states[:, None]])[:, 0], None


def replace_a_module(model: Any, patch: pytest.MonkeyPatch) -> None:
    model.model.layers[1].self_attn = ByHand()


def replace_a_forward(model: Any, patch: pytest.MonkeyPatch) -> None:
    model.model.layers[1].self_attn.forward = MethodType(ByHand.forward, model)


def replace_the_forward_of_the_class(model: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(modeling_llama.LlamaAttention, "forward", ByHand.forward)


def replace_a_function(model: Any, patch: pytest.MonkeyPatch) -> None:
    def rotate(q: Tensor, k: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
        return F.scaled_dot_product_attention(q, q, q), k

    patch.setattr(modeling_llama, "apply_rotary_pos_emb", rotate)


def hook(model: Any, patch: pytest.MonkeyPatch) -> None:
    def look(module: nn.Module, args: Any, out: tuple[Tensor, Any]) -> None:
        F.scaled_dot_product_attention(*3 * [out[0][:, None]])

    model.model.layers[1].self_attn.register_forward_hook(look)


def exchange_a_child(model: Any, patch: pytest.MonkeyPatch) -> None:
    model.model.layers[1].mlp.act_fn = nn.Softmax(-1)


CHANGES = {
    replace_a_module: 3,
    replace_a_forward: 3,
    replace_the_forward_of_the_class: 3,
    replace_a_function: 6,
    hook: 4,
    exchange_a_child: 3,
}  # and the calls of attention that there are then


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_is_watched(change: Change, llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_quiet(llama)
    change(llama, monkeypatch)
    assert not is_quiet(llama)
    monkeypatch.undo()
    assert is_quiet(build("Llama", "sdpa"))


@pytest.mark.parametrize(("change", "calls"), CHANGES.items())
def test_what_is_changed_within_the_block_is_seen(
    change: Change, calls: int, llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = text(padded=False) | {"use_cache": False}
    with torch.no_grad(), record(llama) as recording:
        llama(**given)
        change(llama, monkeypatch)
        out = llama(**given).logits
        assert torch._C._len_torch_function_stack() == 0
    assert [len(each) for each in recording.passes] == [3, calls]
    assert torch.equal(out, llama(**given).logits)


# --- code that attends beside the interface -----------------------------------------------------------------

SETTING = """
class Attention(nn.Module):
    def forward(self, x):
        {body}
"""
GIVEN = "attend = ALL.get_interface(self.config._attn_implementation, eager); return attend(self, x)"


def module_of(body: str, **names: Any) -> nn.Module:
    """A module as if transformers had it."""
    space: dict[str, Any] = {"__name__": "transformers.models.made_up", "nn": nn, "F": F, "torch": torch}
    space |= {"ALL": modeling_llama.ALL_ATTENTION_FUNCTIONS, "eager": modeling_llama.eager_attention_forward, **names}
    exec(SETTING.format(body=body), space)
    module: nn.Module = space["Attention"]()
    return module


def test_what_the_interface_gives_needs_no_watching() -> None:
    assert is_quiet(module_of(GIVEN))
    assert is_quiet(module_of("return F.log_softmax(x, -1)"))


@pytest.mark.parametrize(
    "body",
    [
        "return eager(self, x)",
        "return ALL['sdpa'](self, x)",
        f"ALL['sdpa'](self, x); {GIVEN}",
        f"eager(self, x); {GIVEN}",
        "return F.softmax(x, -1)",
        "return x.softmax(-1)",
        "return (lambda: torch.softmax(x, -1))()",
        "return F.scaled_dot_product_attention(x, x, x)",
        "return alias(x, x, x)",
        "return ours(x, x, x)",
        "return torch.nn.attention.flex_attention.flex_attention(x, x, x)",
        "return partial(x)",
        "return table['one'](x)",
        "return nn.MultiheadAttention(4, 1)(x, x, x)",
    ],
)
def test_other_ways_to_attend_are_watched(body: str) -> None:
    names = {
        "alias": F.scaled_dot_product_attention,
        "ours": clearhead.scaled_dot_product_attention,
        "partial": functools.partial(modeling_llama.eager_attention_forward, None),
        "table": {"one": modeling_llama.eager_attention_forward},
    }
    assert not is_quiet(module_of(body, **names))


# --- a pass that is not watched -----------------------------------------------------------------------------


def test_nothing_is_watched_where_that_is_not_needed(llama: Any) -> None:
    """No function mode is on, and the call of other modules is PyTorch's own."""
    seen = []
    call = nn.Module.__call__

    class Cache(DynamicCache):
        def update(self, *args: Any, **kwargs: Any) -> Any:
            seen.append((torch._C._len_torch_function_stack(), nn.Module.__call__ is call))
            return super().update(*args, **kwargs)

    with torch.no_grad(), record(llama):
        llama(**text(padded=False), **{argument_of(llama): Cache(config=llama.config)})
    assert set(seen) == {(0, True)}


@pytest.mark.filterwarnings("ignore")  # what compiles has many
def test_a_compiled_model_that_holds_the_recorded_one_is_refused(llama: Any) -> None:
    with torch.no_grad(), pytest.raises(RecordingError, match="compiled, was called in a block"), record(llama):
        torch.compile(nn.Sequential(llama))(text(padded=False)["input_ids"])


@pytest.mark.parametrize("padded", [False, True])
def test_both_ways_record_the_same(padded: bool, llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.no_grad(), record(llama) as recording:
        llama(**text(padded))
    monkeypatch.setattr(recorder, "attends_by_interface_alone", lambda parts: False)
    with torch.no_grad(), record(llama) as watched:
        llama(**text(padded))
    assert recording.paths == watched.paths
    for one, other in zip(recording, watched, strict=True):
        assert torch.equal(one.to_dense(), other.to_dense())


def test_blocks_of_both_kinds_overlap(llama: Any, make_nano: Callable[[], nn.Module], ids: Tensor) -> None:
    nano, given = make_nano(), text(padded=False)
    with torch.no_grad(), record(llama) as outer:
        with record(nano) as inner:
            llama(**given)
            nano(ids)
        llama(**given)
    assert ([len(each) for each in outer.passes], inner.paths) == ([3, 3], [f"h.{n}.attn" for n in range(3)])
    assert outer.passes[0].paths == outer.passes[1].paths


def test_keys_that_are_overwritten_later_in_the_pass_cannot_be_read(llama: Any) -> None:
    class Cache(DynamicCache):
        def update(self, k: Tensor, v: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
            if layer_idx == 2:
                self.layers[1].keys.mul_(2)
            return super().update(k, v, layer_idx, *args, **kwargs)

    with torch.no_grad(), record(llama) as recording:
        llama(**text(padded=False), **{argument_of(llama): Cache(config=llama.config)})
    assert torch.isfinite(recording[0].entropy()).all()
    with pytest.raises(RecordingError, match=r"layer 1 .*overwritten in place"):
        recording[1]
