"""Training inside a block, and outside of it on what was recorded; gradient checkpointing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

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


def test_an_entropy_penalty_trains():
    model, inputs = build("llama").train(), prompt()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    entropies = []
    for _ in range(8):
        with record(model, detach=False) as recording:
            model(**inputs)
        penalty = sum(attn.entropy().mean() for attn in recording)
        entropies.append(penalty.item())
        optimizer.zero_grad()
        penalty.backward()
        optimizer.step()
    assert entropies[-1] < 0.9 * entropies[0]


def test_a_block_around_steps_of_training_holds_a_pass_for_each():
    model, inputs = build("llama").train(), prompt()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with record(model) as recording:
        for _ in range(3):
            model(**inputs, labels=inputs["input_ids"]).loss.backward()
            optimizer.step()
    assert len(recording.passes) == 3
    assert worst(recording.passes[0], recording.passes[2]) > 1e-4
