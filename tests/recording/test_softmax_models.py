"""Seam 4 on whole models: those of textbooks, of clearhead's own ladder, and of transformers where it has its own."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import clearhead
from clearhead import DenseMap, SoftmaxMap
from clearhead.recording import record

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


# --- models of transformers that have attention functions of their own ----------------------------


SMALL = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
FAMILIES: dict[str, tuple[str, dict[str, Any], type]] = {
    "bloom": ("Bloom", {"vocab_size": 50, "hidden_size": 32, "n_layer": 2, "n_head": 4}, SoftmaxMap),
    "mpt": ("Mpt", {"vocab_size": 50, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 16}, SoftmaxMap),
    "deberta": (
        "DebertaV2",
        {**SMALL, "intermediate_size": 32, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
        DenseMap,
    ),
    "xglm": (
        "XGLM",
        {"vocab_size": 50, "d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 32},
        SoftmaxMap,
    ),
    "xlnet": ("XLNet", {"vocab_size": 50, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 32}, DenseMap),
    "mpnet": ("MPNet", {**SMALL, "intermediate_size": 32}, DenseMap),
    "megatron": ("MegatronBert", {**SMALL, "intermediate_size": 32}, SoftmaxMap),
    "falcon": ("Falcon", {**SMALL, "attn_implementation": "eager"}, SoftmaxMap),
}


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("family", FAMILIES)
def test_models_with_a_softmax_of_their_own_match_their_weights(family, side):
    transformers = pytest.importorskip("transformers")
    name, config, kind = FAMILIES[family]
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**config)).eval()
    real = {"none": ~PADDED | True, "right": ~PADDED, "left": ~PADDED.flip(1)}[side]
    given = {"input_ids": torch.randint(3, 50, (B, T)), "attention_mask": real.long()}
    with torch.no_grad():
        plain = model(**given)
        with record(model) as recording:
            out = model(**given)
        theirs = model(**given, output_attentions=True).attentions
    assert torch.equal(out[0], plain[0])
    assert len(recording) == len(theirs) == 2
    for attn, weights in zip(recording, theirs, strict=True):
        assert isinstance(attn, kind)
        off = (attn.to_dense() - weights).abs() * real[:, None, :, None]
        assert off.max() <= 1e-6
        assert (attn.to_dense()[(~real)[:, None].expand(B, 4, T)] == 0).all()


def test_trap_a_mixture_of_experts_has_its_attention_and_no_router():
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        **SMALL, num_key_value_heads=2, intermediate_size=32, num_local_experts=4, attn_implementation="sdpa"
    )
    model = transformers.MixtralModel(config).eval()
    with torch.no_grad(), record(model) as recording:
        model(input_ids=torch.randint(3, 50, (B, T)))
    assert recording.paths == ["layers.0.self_attn", "layers.1.self_attn"]


def test_trap20_generation_with_alibi_is_one_map_a_layer():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BloomConfig(**FAMILIES["bloom"][1], bos_token_id=1, eos_token_id=2)
    model = transformers.BloomForCausalLM(config).eval()
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
