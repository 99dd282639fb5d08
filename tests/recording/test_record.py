"""The block: what is seen, what is restored, and every message."""

from __future__ import annotations

import contextvars
import copy
import gc
import pickle
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead.errors import RecordingError, ShapeError
from clearhead.recording import record
from clearhead.recording.observer import current

# --- nothing is left behind -----------------------------------------------------------------------


def test_trap02_everything_is_as_before_after_a_block(nano, ids, touched):
    before, modules = touched(), {name: dict(vars(module)) for name, module in nano.named_modules()}
    with record(nano):
        nano(ids)
    assert touched() == before
    assert {name: dict(vars(module)) for name, module in nano.named_modules()} == modules


WHERE = ["before", "in a hook", "in a module", "in a function of PyTorch", "in attention", "while it is read"]
WHERE += ["in keep", "in backward", "after"]


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
@pytest.mark.parametrize("where", WHERE)
def test_trap02_everything_is_as_before_after_an_exception_anywhere(nano, ids, touched, monkeypatch, where, error):
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise error

    before, keep, block = touched(), None, nano.h[1]
    with monkeypatch.context() as patch:
        if where == "in a hook":
            block.mlp.register_forward_pre_hook(fail)
        if where == "in a module":
            patch.setattr(block.mlp, "forward", fail)
        if where == "in attention":
            patch.setattr(F, "scaled_dot_product_attention", fail)
        if where == "in a function of PyTorch":
            patch.setattr(torch, "layer_norm", fail)  # which F.layer_norm calls, below the function mode
        if where == "while it is read":
            patch.setattr("clearhead.recording.recorder.Layer", fail)
        if where == "in keep":
            keep = fail
        expected = RecordingError if where == "in keep" and error is ZeroDivisionError else error
        with pytest.raises(expected), record(nano, keep=keep):  # noqa: PT012 (it is about where in the block)
            if where == "before":
                fail()
            out = nano(ids)
            if where == "in backward":
                out.register_hook(fail)
                out.sum().backward()
            fail()
    assert touched() == before
    assert current() is None
    block.mlp._forward_pre_hooks.clear()
    with record(nano) as recording:  # nothing of it is in the way of the next block
        nano(ids)
    assert len(recording) == 3


def test_trap02_everything_is_as_before_after_a_failed_construction(touched):
    before = touched()
    for model in [None, "gpt2", lambda x: x]:
        with pytest.raises(RecordingError):
            record(model)
    assert touched() == before


def test_trap02_everything_is_as_before_after_a_block_that_could_not_be_entered(nano, touched, monkeypatch):
    before = touched()
    monkeypatch.setattr("clearhead.recording.huggingface.replacements", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError), record(nano):
        pass
    assert touched() == before


def test_an_exception_of_the_block_is_not_hidden_by_one_of_ours(nano):
    with pytest.raises(KeyError), record(nano):
        raise KeyError  # the model was never called either


def test_a_call_that_failed_leaves_no_pass(nano, ids):
    with record(nano) as recording:
        with pytest.raises(IndexError):
            nano(ids + 1000)
        nano(ids)
    assert len(recording.passes) == 1


def test_trap02_training_mode_grad_mode_and_random_numbers_stay(nano, ids):
    nano.train()
    with torch.inference_mode(), record(nano) as recording:
        out = nano(ids)
        assert torch.is_inference_mode_enabled()
    assert nano.training
    assert out.is_inference()
    assert recording[0].to_dense().shape == (2, 4, 11, 11)


# --- whose calls are seen -------------------------------------------------------------------------


def test_nested_blocks_of_one_model_both_see_it(nano, ids, touched):
    before = touched()
    with record(nano) as outer:
        with record(nano, layers=[1]) as inner:
            nano(ids)
        nano(ids)
    assert [len(each) for each in outer.passes] == [3, 3]
    assert inner.layers == [1]
    assert torch.equal(inner[0].to_dense(), outer.passes[0][1].to_dense())
    assert touched() == before


def test_nested_blocks_of_two_models_each_see_their_own(make_nano, ids, touched):
    class Outer(nn.Module):
        """Calls a model that is no part of it, between its own calls of attention."""

        def __init__(self) -> None:
            super().__init__()
            self.nano, self.other = make_nano(layers=2), [make_nano(layers=3)]

        def forward(self, ids: Tensor) -> Tensor:
            return self.nano(ids) + self.other[0](ids) + self.nano(ids)

    outer, before = Outer().eval(), touched()[:-1]
    inner = outer.other[0]
    with record(outer) as one, record(inner) as other:
        inner(ids)
        outer(ids)
        outer.nano(ids)
    assert one.paths == [f"nano.h.{n}.attn" for n in (0, 1)] * 2
    assert [each.paths for each in other.passes] == [[f"h.{n}.attn" for n in range(3)]] * 2
    assert touched()[:-1] == before


def test_overlapping_blocks_each_see_what_was_called_while_they_were_open(nano, ids, touched):
    before = touched()
    a, b = record(nano), record(nano)
    first = a.__enter__()
    second = b.__enter__()
    nano(ids)
    a.__exit__(None, None, None)
    nano(ids)
    nano(ids)
    b.__exit__(None, None, None)
    assert (len(first.passes), len(second.passes)) == (1, 3)
    assert current() is None
    assert touched() == before


def test_a_block_that_closes_in_another_context_closes_itself_and_no_other(nano, ids):
    a, b = record(nano), record(nano)
    elsewhere = contextvars.copy_context()
    first = elsewhere.run(a.__enter__)
    with b as second:
        elsewhere.run(nano, ids)
        a.__exit__(None, None, None)
        elsewhere.run(nano, ids)
        nano(ids)
    assert (len(first.passes), len(second.passes)) == (1, 1)
    assert current() is elsewhere.run(current) is None


def test_a_pass_that_one_block_cannot_begin_is_open_in_none(nano, ids, monkeypatch):
    from clearhead.recording import recorder

    read, calls = recorder.read_padding, []

    def second_one_fails(*args: Any) -> Any:
        calls.append(1)
        return 1 / 0 if len(calls) == 2 else read(*args)

    monkeypatch.setattr(recorder, "read_padding", second_one_fails)
    with record(nano) as outer, record(nano) as inner:
        with pytest.raises(ZeroDivisionError):
            nano(ids)
        assert current().running == 0
        nano(ids)
    assert [len(each) for each in outer.passes] == [len(each) for each in inner.passes] == [3]


def test_a_block_for_a_part_sees_the_part_only(nano, ids):
    with record(nano) as whole, record(nano.h[1]) as part:
        nano(ids)
    assert whole.paths == ["h.0.attn", "h.1.attn", "h.2.attn"]
    assert part.paths == ["attn"]


def test_another_models_calls_are_not_recorded(nano, make_nano, ids):
    other = make_nano().eval()
    with record(nano) as recording:
        other(ids)
        nano(ids)
        F.scaled_dot_product_attention(*[torch.randn(1, 1, 3, 4)] * 3)
    assert len(recording.passes) == 1
    assert len(recording) == 3


def test_a_model_that_only_uses_another_says_so(make_nano, ids):
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden = [make_nano()]  # a list: not a submodule

        def forward(self, x: Tensor) -> Tensor:
            return self.hidden[0](x)

    model = Holder()
    with (
        pytest.raises(RecordingError, match=r"not registered as its\n?.*submodules.*CausalSelfAttention made"),
        record(model),
    ):
        model(ids)


@pytest.mark.parametrize("copy_context", [False, True])
def test_another_threads_calls_are_not_recorded(nano, ids, copy_context):
    def call() -> None:
        for _ in range(5):
            nano(ids)

    context = contextvars.copy_context()
    with record(nano) as recording:
        run = (lambda: contextvars.copy_context().run(call)) if copy_context else call
        inner = contextvars.copy_context()
        thread = threading.Thread(target=lambda: inner.run(call) if copy_context else context.run(run))
        thread.start()
        nano(ids)
        thread.join()
    assert len(recording.passes) == 1


def test_blocks_in_two_threads_are_separate(make_nano, ids, touched):
    before, seen, errors = touched()[:-1], {}, []
    gate = threading.Barrier(2)

    def work(layers: int) -> None:
        try:
            model = make_nano(layers=layers).eval()
            gate.wait()
            for _ in range(5):
                with record(model) as recording, torch.no_grad():
                    model(ids)
                seen.setdefault(layers, set()).add(len(recording))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in (2, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert seen == {2: {2}, 4: {4}}
    assert touched()[:-1] == before


def test_a_root_that_calls_itself_is_one_pass():
    class Twice(nn.Module):
        def forward(self, x: Tensor, again: bool = True) -> Tensor:
            x = F.scaled_dot_product_attention(x, x, x)
            return self(x, again=False) if again else x

    model = Twice()
    with record(model) as recording:
        model(torch.randn(1, 2, 3, 4))
    assert [len(each) for each in recording.passes] == [2]


# --- memory ---------------------------------------------------------------------------------------


def test_trap02_nothing_is_alive_after_the_block_but_what_the_recording_holds(make_nano, ids):
    model = make_nano()
    manager = record(model)
    with manager as recording:
        model(ids)
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None
    assert all(t.grad_fn is None for attn in recording for t in (attn.q, attn.k, attn.v))
    assert not any(t.requires_grad for attn in recording for t in (attn.q, attn.k, attn.v))
    maps = [weakref.ref(attn) for attn in recording]
    del recording, manager
    gc.collect()
    assert all(ref() is None for ref in maps)


@pytest.mark.parametrize("how", ["with a graph", "without one", "reduced"])
def test_trap02_no_tensor_is_alive_after_the_block_but_those_that_the_recording_counts(nano, ids, alive, how):
    nano.train(how != "without one")
    nano(ids)  # whatever PyTorch makes once
    before = alive()
    keep = (lambda name, attn: attn.entropy().sum().item()) if how == "reduced" else None
    with record(nano, keep=keep) as recording, torch.set_grad_enabled(how != "without one"):
        nano(ids)
    held = {at: nbytes for at, nbytes in alive().items() if at not in before}
    assert sum(held.values()) == recording.nbytes


def test_detach_false_keeps_the_graph_and_trains(nano, ids):
    with record(nano, detach=False) as recording:
        nano(ids)
    recording[2].entropy().mean().backward()
    assert nano.h[0].attn.c_attn.weight.grad.abs().sum() > 0


def test_trap10_holding_a_recording_costs_what_q_k_and_v_cost(attend):
    q = torch.randn(1, 4, 2048, 16)
    with record(attend) as recording:
        attend(q, q, q, is_causal=True)
    assert recording.nbytes == q.untyped_storage().nbytes()
    assert recording.dense_nbytes == 4 * 4 * 2048**2


def test_overwritten_tensors_raise_on_reading_and_not_before(attend):
    q, k, mask = torch.randn(1, 2, 5, 4), torch.randn(1, 2, 5, 4), torch.ones(5, 5, dtype=torch.bool)
    with record(attend) as recording:
        attend(q, k, q, attn_mask=mask)
        recording  # noqa: B018
    kept = recording[0]
    assert kept.to_dense().isfinite().all()
    k.mul_(2)
    with pytest.raises(RecordingError, match=r"layer 0 \(''\) can no longer be read.*overwritten in place"):
        recording[0]
    with pytest.raises(RecordingError, match="overwritten in place"):
        kept.to_dense()


def test_what_was_overwritten_before_the_first_reading_raises_too(attend):
    v = torch.randn(1, 2, 5, 4)
    with record(attend) as recording:
        attend(v + 1, v + 2, v)
    v.mul_(2)
    with pytest.raises(RecordingError, match="overwritten in place"):
        recording[0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("which", ["q", "k", "v", "mask"])
def test_inference_tensors_that_were_overwritten_raise_too_though_they_count_no_versions(attend, dtype, which):
    with torch.inference_mode():
        given = {name: torch.randn(1, 2, 5, 4, dtype=dtype) for name in ("q", "k", "v")}
        given["mask"] = torch.ones(5, 5, dtype=torch.bool)
        with record(attend) as recording:
            attend(given["q"], given["k"], given["v"], attn_mask=given["mask"])
        copied = pickle.loads(pickle.dumps(recording))
        assert torch.equal(recording[0].to_dense(), copied[0].to_dense())
        given[which][..., 0, 0] = 0
        with pytest.raises(RecordingError, match="overwritten in place"):
            recording[0]
        copied[0]


@pytest.mark.parametrize("again", [copy.deepcopy, lambda thing: pickle.loads(pickle.dumps(thing))])
def test_a_recording_can_be_copied_and_pickled(nano, ids, again):
    with record(nano) as recording:
        nano(ids)
    dense = recording[1].to_dense()  # the map is made, and holds versions of its own
    for copied in (again(recording), again(recording.passes[0])):
        assert torch.equal(copied[1].to_dense(), dense)
        assert copied.paths == recording.paths
    recording[1].v.mul_(2)
    with pytest.raises(RecordingError, match="overwritten in place"):
        again(recording)


def test_an_overwritten_mask_raises_too(attend):
    q, mask = torch.randn(1, 2, 5, 4), torch.ones(5, 5, dtype=torch.bool)
    with record(attend) as recording:
        attend(q, q, q, attn_mask=mask)
    mask[0, 0] = False
    with pytest.raises(RecordingError, match=r"mask or bias was overwritten"):
        recording[0]


# --- messages -------------------------------------------------------------------------------------


def test_trap26_nothing_was_seen_lists_the_likely_causes():
    class ByHand(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            weights = (x @ x.mT).exp()
            return weights @ x / weights.sum(-1, keepdim=True)

    model = ByHand()
    with (
        pytest.raises(
            RecordingError, match=r"(?s)call was seen.*\(a\).*hand.*\(b\).*kernel.*\(c\).*modules.*\(d\).*thread"
        ),
        record(model),
    ):
        model(torch.randn(1, 3, 4))


def test_trap26_a_model_that_was_not_called_has_its_own_message(nano, ids):
    with (
        pytest.raises(RecordingError, match=r"record\(NanoGPT\): the model was not called inside the block"),
        record(nano),
    ):
        nano.h[0](nano.wte(ids))


def test_a_forward_that_is_called_by_itself_is_a_pass_too(nano, ids, touched):
    before = touched()
    with record(nano) as recording:
        nano(ids)
        out = nano.forward(ids)
    assert touched() == before
    assert torch.equal(out, nano(ids))
    called, entered = recording.passes
    assert called.paths == entered.paths
    assert torch.equal(called[2].to_dense(), entered[2].to_dense())


def test_a_forward_that_calls_that_of_its_parent_is_one_pass(make_nano, ids):
    class Child(make_nano):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids)

    parent, child = make_nano().eval(), Child().eval()
    with record(parent) as theirs, record(child) as ours:
        child.forward(ids)
        parent.forward(ids)
        child(ids)
    assert (len(theirs.passes), len(ours.passes)) == (1, 2)
    assert "forward" in vars(Child)


def test_trap26_only_failed_calls_have_their_own_message(nano, ids):
    with (
        pytest.raises(RecordingError, match="every call of the model in this block ended in an exception"),
        record(nano),
        pytest.raises(IndexError),
    ):
        nano(ids + 1000)


def test_layers_keep_their_numbers(nano, ids):
    with record(nano, layers=range(1, 3)) as recording:
        nano(ids)
    assert recording.layers == [1, 2]
    assert recording.paths == ["h.1.attn", "h.2.attn"]


def test_an_unknown_layer_names_what_exists(nano, ids):
    with (
        pytest.raises(RecordingError, match=r"there is no layer 7; the model made 3 attention calls, layers 0, 1, 2"),
        record(nano, layers=[0, 7]),
    ):
        nano(ids)


@pytest.mark.parametrize("layers", [[-1], [True], [0.0], [], 3, "all"])
def test_layers_are_numbers_from_zero(nano, layers):
    with pytest.raises(RecordingError, match="expected layer numbers, a list of integers from 0"):
        record(nano, layers=layers)


@pytest.mark.parametrize("padding", [torch.ones(3), torch.ones(2, 3), True, "left", [[1, 0]]])
def test_padding_is_a_mask_or_false(nano, padding):
    with pytest.raises(ShapeError, match=r"record\(padding=.*expected the tokenizer's attention_mask"):
        record(nano, padding=padding)


def test_a_recorder_is_for_one_block(nano, ids):
    recorder = record(nano)
    with recorder:
        nano(ids)
    with pytest.raises(RecordingError, match=r"call clearhead\.record\(model\) again"), recorder:
        pass


def test_a_recorder_that_is_open_cannot_be_entered_again(nano, ids, touched):
    before, recorder = touched(), record(nano)
    with recorder as recording:
        with pytest.raises(RecordingError, match=r"is in use: call clearhead\.record\(model\) again"):
            recorder.__enter__()
        nano(ids)
    assert len(recording.passes) == 1
    assert touched() == before
    with pytest.raises(RecordingError, match="is not in use"):
        record(nano).__exit__(None, None, None)
