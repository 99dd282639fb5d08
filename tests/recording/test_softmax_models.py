"""Seam 4 on whole models: those of textbooks, of clearhead's own ladder, and of transformers where it has its own."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import clearhead
from clearhead import SoftmaxMap
from clearhead.recording import record

from .architectures import build

B, T = 2, 7
PADDED = torch.arange(T).expand(B, T) >= torch.tensor([[T], [4]])  # (B, T), the last keys of the second entry

# --- as textbooks write it ------------------------------------------------------------------------


class SlowAttention(nn.Module):
    """nanoGPT's attention without the fused function."""

    def __init__(self, fast: nn.Module, block_size: int = 64) -> None:
        super().__init__()
        self.c_attn, self.c_proj, self.n_head = fast.c_attn, fast.c_proj, fast.heads
        self.attn_dropout = nn.Dropout(0.3)
        lower = torch.tril(torch.ones(block_size, block_size))
        self.register_buffer("bias", lower.view(1, 1, block_size, block_size))

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(C, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        att = self.attn_dropout(F.softmax(att, dim=-1))
        return self.c_proj((att @ v).transpose(1, 2).contiguous().view(B, T, C))


@pytest.mark.parametrize("training", [False, True])
def test_trap01_a_nanogpt_without_the_fused_function_gives_the_same_maps(nano, ids, training):
    with record(nano) as fused:
        nano(ids)
    for block in nano.h:
        block.attn = SlowAttention(block.attn)
    nano.train(training)
    torch.manual_seed(1)
    plain, state = nano(ids), torch.get_rng_state()
    torch.manual_seed(1)
    with record(nano) as recording:
        out = nano(ids)
    assert torch.equal(out, plain)
    assert torch.equal(torch.get_rng_state(), state)
    assert recording.paths == ["h.0.attn", "h.1.attn", "h.2.attn"]
    assert all(repr(attn.mask) == "causal()" for attn in recording)
    assert recording.nbytes == fused.nbytes
    for slow, fast in zip(recording[: 1 if training else 3], fused, strict=False):  # dropout changes what comes after
        assert (slow.to_dense() - fast.to_dense()).abs().max() <= 1e-6


class BertSelfAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.dropout = nn.Dropout(0.1)

    def split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.heads, -1).permute(0, 2, 1, 3)

    def forward(self, x: Tensor, extended_mask: Tensor, attentions: list[Tensor]) -> Tensor:
        query, key, value = self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))
        scores = torch.matmul(query, key.transpose(-1, -2))
        scores = scores / math.sqrt(query.shape[-1])
        scores = scores + extended_mask
        probs = nn.Softmax(dim=-1)(scores)
        attentions.append(probs)
        context = torch.matmul(self.dropout(probs), value).permute(0, 2, 1, 3).contiguous()
        return context.view(*x.shape)


class Bert(nn.Module):
    """BERT from scratch: padding is hidden by adding -10000."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.layer = nn.ModuleList(BertSelfAttention(32, 4) for _ in range(2))

    def forward(self, ids: Tensor, attention_mask: Tensor, attentions: list[Tensor]) -> Tensor:
        extended = (1.0 - attention_mask[:, None, None].to(torch.float32)) * -10000.0
        x = self.embed(ids)
        for layer in self.layer:
            x = x + layer(x, extended, attentions)
        return x


@pytest.mark.parametrize("side", ["left", "right"])
def test_trap05_a_bert_from_scratch_with_padding(side):
    torch.manual_seed(0)
    model, real = Bert().eval(), ~(PADDED if side == "right" else PADDED.flip(1))
    ids, theirs = torch.randint(0, 50, (B, T)), []
    plain = model(ids, real.long(), [])
    with record(model) as recording:
        out = model(ids, real.long(), theirs)
    assert torch.equal(out, plain)
    assert recording.paths == ["layer.0", "layer.1"]
    for attn, weights in zip(recording, theirs, strict=True):
        assert isinstance(attn, SoftmaxMap)
        assert (attn.to_dense() - weights * real[:, None, :, None]).abs().max() <= 1e-6


class FairseqAttention(nn.Module):
    """Sequences first, batch and heads as one dimension, as fairseq and old PyTorch write it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def split(self, x: Tensor, B: int) -> Tensor:
        return x.contiguous().view(-1, B * self.heads, x.shape[-1] // self.heads).transpose(0, 1)

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        S, B, E = x.shape
        q, k, v = (
            self.split(self.q(x) * (E // self.heads) ** -0.5, B),
            self.split(self.k(x), B),
            self.split(self.v(x), B),
        )
        hidden = (attention_mask == 0).repeat_interleave(self.heads, 0)[:, None]
        weights = F.softmax(torch.bmm(q, k.transpose(1, 2)).masked_fill(hidden, -torch.inf), dim=-1)
        return self.out(torch.bmm(weights, v).transpose(0, 1).contiguous().view(S, B, E))


def test_trap14_batch_and_heads_in_one_dimension_are_told_apart():
    torch.manual_seed(0)
    model, x, real = FairseqAttention(32, 4).eval(), torch.randn(T, B, 32), ~PADDED
    plain = model(x, real.long())
    with record(model) as recording:
        out = model(x, real.long())
    q, k = (each(x).unflatten(-1, (4, 8)).permute(1, 2, 0, 3).double() for each in (model.q, model.k))
    expected = (q @ k.mT / 8**0.5).masked_fill(~real[:, None, None], -torch.inf).softmax(-1) * real[:, None, :, None]
    assert torch.equal(out, plain)
    assert recording[0].shape == (B, 4, T, T)
    assert (recording[0].to_dense() - expected).abs().max() <= 1e-6


# --- the ladder -----------------------------------------------------------------------------------


@pytest.mark.parametrize("rung", ["SelfAttention", "RawSelfAttention", "CausalAttention", "MultiHeadAttentionWrapper"])
def test_the_ladders_layers_are_seen_inside_a_model(rung):
    make = getattr(clearhead.nn, rung)
    more = {"context_length": 8, "dropout": 0.1} if "elf" not in rung else {}
    heads = {"num_heads": 2} if "Head" in rung else {}

    class GPT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embed = nn.Embedding(20, 6)
            self.layers = nn.ModuleList(make(d_in=6, d_out=6 // max(1, len(heads) * 2), **more, **heads) for _ in "ab")

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            for layer in self.layers:
                x = x + layer(x)
            return x

    model, ids = GPT().eval(), torch.arange(10).view(2, 5)
    with record(model) as recording:
        model(ids)
    own = model.layers[0].attend(model.embed(ids))[1]
    own = own if len(own.shape) == 4 else own.to_dense()[:, None]
    found = torch.cat([attn.to_dense() for attn in recording[: len(recording) // 2]], 1)
    assert (found - (own if isinstance(own, Tensor) else own.to_dense())).abs().max() <= 1e-6
    assert len(recording) == (4 if heads else 2)
    assert all(isinstance(attn, SoftmaxMap) and attn.bias is None for attn in recording)


# --- models of transformers: beside what `test_support.py` shows of every architecture ----------------------


def test_trap_a_mixture_of_experts_has_its_attention_and_no_router():
    pytest.importorskip("transformers")
    model = build("Mixtral", "sdpa")
    with torch.no_grad(), record(model) as recording:
        model(input_ids=torch.randint(3, 50, (B, T)))
    assert recording.paths == [f"model.layers.{n}.self_attn" for n in range(3)]


def test_trap20_generation_with_alibi_is_one_map_a_layer():
    pytest.importorskip("transformers")
    model = build("Bloom")
    real = ~PADDED.flip(1)
    given = {"input_ids": torch.randint(3, 50, (B, T)), "attention_mask": real.long()}
    with torch.no_grad():
        with record(model) as steps:
            text = model.generate(**given, max_new_tokens=4, min_new_tokens=4, do_sample=False)
        seen = torch.cat([real, torch.ones(B, 3, dtype=torch.bool)], 1)  # the last token is never a query
        with record(model) as whole:
            model(input_ids=text[:, :-1], attention_mask=seen.long())
    for attn, at_once in zip(steps, whole, strict=True):
        assert (attn.to_dense() - at_once.to_dense()).abs().max() <= 1e-6
