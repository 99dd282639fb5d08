"""Training inside a block, and outside of it on what was recorded; gradient checkpointing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from clearhead.maps import AttentionMap
from clearhead.recording import Recording, record

from .generated import build, prompt, worst


def trained(model: Any, inputs: dict[str, Tensor]) -> tuple[Recording, dict[str, Tensor]]:
    """One step of training against low entropy: the recording and the gradients."""
    model.zero_grad()
    with record(model, detach=False) as recording:
        loss = model(**inputs, labels=inputs["input_ids"]).loss
        (loss + sum(attn.entropy().mean() for attn in recording)).backward()
    return recording, {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}


def test_gradient_checkpointing_records_each_call_once_and_gives_the_same_gradients():
    model, inputs = build("llama").train(), prompt()
    plain, expected = trained(model, inputs)
    model.activation_checkpointing_enable({"use_reentrant": False})
    recording, gradients = trained(model, inputs)
    assert [len(each) for each in recording.passes] == [3]
    assert worst(recording, plain) == 0
    assert gradients.keys() == expected.keys()
    assert max(float((gradients[name] - expected[name]).abs().max()) for name in expected) <= 1e-6


def test_reentrant_checkpointing_is_recorded_once_and_keeps_no_graph():
    model, inputs = build("llama").train(), prompt()
    model.activation_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    with record(model, detach=False) as recording:
        model(**inputs, labels=inputs["input_ids"]).loss.backward()
    assert [len(each) for each in recording.passes] == [3]
    assert not recording[0].entropy().requires_grad  # PyTorch computes it without one, and again later


ASK: dict[str, Callable[[AttentionMap], Tensor]] = {
    "entropy": lambda attn: attn.entropy(),
    "received": lambda attn: attn.received(),
    "mass": lambda attn: attn.mass([0, 3]),
    "rows": lambda attn: attn[..., 1, :] ** 2,
    "weights": lambda attn: attn.to_dense() ** 2,
    "product": lambda attn: attn @ torch.arange(5.0).expand(2, 4, 5)[..., None],
}


@pytest.mark.parametrize("ask", ASK)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_trap04_gradients_of_what_is_said_are_finite_where_padded_queries_see_nothing(ask, implementation):
    model, inputs = build("llama", implementation).train(), prompt(padded=True)
    with record(model, detach=False) as recording:
        model(**inputs)
    sum(ASK[ask](attn).sum() for attn in recording).backward()
    gradients = [x.grad for x in model.parameters() if x.grad is not None]
    assert any(bool(gradient.any()) for gradient in gradients)
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)


@pytest.mark.parametrize("part", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_what_checkpointing_of_the_recorded_module_itself_computes_again_is_no_second_call(nano, ids, part, reentrant):
    recorded = nano.h[1] if part else nano
    x = torch.randn(2, 11, 32, requires_grad=True) if part else ids
    scale = nn.Parameter(torch.ones(1))  # reentrant checkpointing wants an input with a gradient
    with record(recorded) as recording, torch.utils.checkpoint.set_checkpoint_early_stop(False):
        out = checkpoint(lambda x, scale: recorded(x) * scale, x, scale, use_reentrant=reentrant)
        out.sum().backward()
        assert recorded(x).shape == out.shape  # a call after the backward pass is one again
    assert [len(each) for each in recording.passes] == [1 if part else 3] * 2


@pytest.mark.parametrize("with_loss", [True, False])
def test_steps_of_training_on_an_entropy_penalty_lower_it_and_the_loss_where_that_is_trained(with_loss):
    model, inputs = build("llama").train(), prompt()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    history = []
    for _ in range(8):
        with record(model, detach=False) as recording:
            loss = model(**inputs, labels=inputs["input_ids"]).loss
        penalty = sum(attn.entropy().mean() for attn in recording)
        history.append((loss.item(), penalty.item()))
        optimizer.zero_grad()
        (loss * with_loss + penalty).backward()
        optimizer.step()
    (loss_before, penalty_before), (loss_after, penalty_after) = history[0], history[-1]
    assert penalty_after < 0.95 * penalty_before
    assert not with_loss or loss_after < 0.8 * loss_before


def test_a_block_around_steps_of_training_holds_a_pass_for_each():
    model, inputs = build("llama").train(), prompt()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with record(model) as recording:
        for _ in range(3):
            model(**inputs, labels=inputs["input_ids"]).loss.backward()
            optimizer.step()
    assert len(recording.passes) == 3
    assert worst(recording.passes[0], recording.passes[2]) > 1e-4
