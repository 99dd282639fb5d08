"""GPT: a decoder made of `nn.Attention`, with the choices in which GPT-2 and the Llama family differ.

x = tokens[ids] (+ positions)
x = x + attention(norm(x)),  x = x + mlp(norm(x)),        in every block
logits = norm(x) tokensᵀ                                  with tied weights
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead._checks import check_count, describe, finite_number, has_numbers
from clearhead.errors import DTypeError, ModelError, ShapeError
from clearhead.models import conversion
from clearhead.nn import Attention, KVCache
from clearhead.scores import Rotary

__all__ = ["GPT", "Block", "GPTConfig"]


@dataclass(frozen=True)
class GPTConfig:
    """Sizes and choices of a `GPT`; as they stand, those of GPT-2 with 124,439,808 parameters.

    Args:
        vocab_size: how many tokens there are. context_length: the longest text.
        width: of the residual stream. num_layers: blocks. num_heads: query heads a block.
        num_kv_heads: fewer heads for keys and values; as many by default. d_hidden: width inside the MLP, 4 · width.
        bias: whether linear layers and LayerNorm add an offset.
        rotary: base of a rotary embedding, in place of learned positions. rms_norm: RMSNorm in place of LayerNorm.
        gated: down(silu(gate x) · up x) in place of down(gelu(up x)): SwiGLU, which has three matrices.
        tied: whether the logits come of the embedding's own matrix. norm_eps: added under the root of norms.
        dropout: share of weights, of what a block adds and of embeddings that is dropped while training.
        name: what the model is called.
    """

    is_decoder: ClassVar[bool] = True

    vocab_size: int = 50257
    context_length: int = 1024
    width: int = 768
    num_layers: int = 12
    num_heads: int = 12
    num_kv_heads: int | None = None
    d_hidden: int | None = None
    bias: bool = True
    rotary: float | None = None
    rms_norm: bool = False
    gated: bool = False
    tied: bool = True
    norm_eps: float = 1e-5
    dropout: float = 0.0
    name: str = field(default="GPT", compare=False)

    # What transformers calls the same: whatever reads its configs reads this one.
    hidden_size = property(attrgetter("width"))
    max_position_embeddings = property(attrgetter("context_length"))
    name_or_path = property(attrgetter("name"))
    num_attention_heads = property(attrgetter("num_heads"))
    num_hidden_layers = property(attrgetter("num_layers"))
    num_key_value_heads = property(attrgetter("num_kv_heads"))

    def __post_init__(self) -> None:
        for size in ("vocab_size", "context_length", "width", "num_layers", "num_heads"):
            check_count("GPTConfig", size, getattr(self, size), at_least=1)
        if self.d_hidden is not None:
            check_count("GPTConfig", "d_hidden", self.d_hidden, at_least=1)


class Block(nn.Module):
    """One layer: what attention brings is added to the stream, then what the MLP makes of each token alone.

    Source: Radford et al. 2019, section 2.3 (norms before, not after).
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1, self.norm2 = _norm(config), _norm(config)
        self.attention = Attention(
            config.width,
            config.width,
            config.context_length,
            config.dropout,
            config.num_heads,
            config.bias,
            out_bias=config.bias,
            num_kv_heads=config.num_kv_heads,
            rotary=None if config.rotary is None else Rotary(config.width // config.num_heads, config.rotary),
        )
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, *, padding: Tensor | None = None, cache: KVCache | None = None) -> Tensor:
        """x (B, T, width), a tensor of the same shape."""
        x = x + self.dropout(self.attention(self.norm1(x), padding=padding, cache=cache))
        out: Tensor = x + self.dropout(self.mlp(self.norm2(x)))
        return out


class MLP(nn.Module):
    """down(gelu(up x)), or gated, down(silu(gate x) · up x). Source: Shazeer 2020, section 2 (SwiGLU)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        hidden = config.d_hidden or 4 * config.width
        self.gate = nn.Linear(config.width, hidden, config.bias) if config.gated else None
        self.up = nn.Linear(config.width, hidden, config.bias)
        self.down = nn.Linear(hidden, config.width, config.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x (…, width), a tensor of the same shape."""
        hidden = F.gelu(self.up(x), approximate="tanh") if self.gate is None else F.silu(self.gate(x)) * self.up(x)
        out: Tensor = self.down(hidden)
        return out


class GPT(nn.Module):
    """A language model: at each token, a score for every token that may come next.

    Its attention is `nn.Attention`, so `record`, `look` and `knockout` see it as any other model's.

    Cost: 6 operations a parameter and token to train it, 2 to run it, and attention's O(T²).
    Source: Radford et al. 2019 (GPT-2); Touvron et al. 2023 (rotary, RMSNorm, SwiGLU).

    >>> _ = torch.manual_seed(0)
    >>> model = GPT(GPTConfig(vocab_size=256, context_length=16, width=8, num_layers=2, num_heads=2))
    >>> ids = torch.tensor([list(b"attention")])
    >>> model(ids).shape, round(model.loss(ids).item(), 1)  # log(256) = 5.5: it knows nothing yet
    (torch.Size([1, 9, 256]), 5.5)
    >>> model.generate(ids, 3).shape
    torch.Size([1, 12])
    """

    def __init__(self, config: GPTConfig | None = None) -> None:
        super().__init__()
        self.config = config = GPTConfig() if config is None else config
        self.tokens = nn.Embedding(config.vocab_size, config.width)
        self.positions = nn.Embedding(config.context_length, config.width) if config.rotary is None else None
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = _norm(config)
        self.head = None if config.tied else nn.Linear(config.width, config.vocab_size, bias=False)
        self._initialise()

    def forward(
        self,
        input_ids: Tensor,  # (B, T)
        attention_mask: Tensor | None = None,  # (B, T), or (B, S) with caches
        *,
        caches: Sequence[KVCache] | None = None,
        logits_to_keep: int = 0,
    ) -> Tensor:  # (B, T, vocab_size)
        """The logits of the next token, at every token.

        Args:
            input_ids: what is read; with `caches`, what follows the tokens in them.
            attention_mask: True or 1 where a token is real, as tokenizers give it; all are if it is left out.
            caches: `new_caches(batch)`, one a block, which keep what was read.
            logits_to_keep: of the last so many tokens only; of all for 0.

        Raises: ShapeError, DTypeError.
        """
        past = 0 if caches is None else caches[0].tokens
        self._check(input_ids, past)
        x = self.tokens(input_ids)
        if self.positions is not None:
            x = x + self.positions(torch.arange(past, past + input_ids.shape[1], device=x.device))
        x = self.dropout(x)
        padding = None if attention_mask is None or bool(attention_mask.all()) else attention_mask.bool()
        kept: Sequence[KVCache | None] = caches or [None] * len(self.blocks)
        for block, cache in zip(self.blocks, kept, strict=True):
            x = block(x, padding=padding, cache=cache)
        x = self.norm(x[:, -logits_to_keep:])
        return F.linear(x, (self.tokens if self.head is None else self.head).weight)

    def loss(self, ids: Tensor) -> Tensor:
        """How badly each token is foretold of those before it: the mean of -log p, in nats.

        ids: (B, T + 1), of which the last is not read and the first not foretold. Returns: a scalar.
        """
        return F.cross_entropy(self(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    def get_input_embeddings(self) -> nn.Embedding:
        """The embedding of tokens, by the name that it has in transformers."""
        return self.tokens

    def new_caches(self, batch: int = 1) -> list[KVCache]:
        """Empty caches for one text of `context_length` tokens, one a block."""
        return [block.attention.new_cache(batch) for block in self.blocks]  # type: ignore[union-attr, operator]

    def generate(
        self, input_ids: Tensor, max_new_tokens: int, *, temperature: float = 0.0, top_k: int | None = None
    ) -> Tensor:
        """The text and what the model goes on with, (B, T + max_new_tokens). Args: see `stream`."""
        written = list(self.stream(input_ids, max_new_tokens, temperature=temperature, top_k=top_k))
        return torch.cat([input_ids, *written], 1)

    @torch.no_grad()
    def stream(
        self, input_ids: Tensor, max_new_tokens: int, *, temperature: float = 0.0, top_k: int | None = None
    ) -> Iterator[Tensor]:
        """Each next token (B, 1) as it is chosen.

        Where the text reaches `context_length`, the model reads its last half anew and goes on.

        Args:
            input_ids: (B, T) of at least one token; of a longer text than the context, the last tokens count.
            temperature: 0 takes the likeliest token; above, one is drawn from softmax(logits / temperature) with
                PyTorch's generator. top_k: drawn among the k likeliest only.
        """
        check_count("generate", "max_new_tokens", max_new_tokens, at_least=0)
        if top_k is not None:
            check_count("generate", "top_k", top_k, at_least=1)
        if finite_number("generate", "temperature", temperature) < 0:
            raise ShapeError(f"generate(temperature={temperature}): expected 0, or a number above it.")
        longest = self.config.context_length
        text = new = input_ids[:, -longest:]
        caches = self.new_caches(len(text))
        for _ in range(max_new_tokens):
            logits = self(new, caches=caches, logits_to_keep=1)[:, -1]
            new = _chosen(logits, temperature, top_k)
            yield new
            text = torch.cat([text, new], 1)
            if text.shape[1] > longest:
                text = new = text[:, -max(1, longest // 2) :]
                caches = self.new_caches(len(text))

    @classmethod
    def from_huggingface(cls, model: Any) -> GPT:
        """The same model as a Hugging Face GPT-2 or Llama (SmolLM2 is one), with a copy of its weights.

        Raises ModelError for other architectures, and for settings that have no counterpart here.
        """
        weight = model.get_input_embeddings().weight
        with torch.device("meta"):  # the weights are not to be drawn before they are replaced
            made = cls(GPTConfig(**conversion.arguments(model.config)))
        made = made.to_empty(device=weight.device).to(weight.dtype)
        made.load_state_dict(conversion.weights(model))
        return made.train(model.training)

    def _initialise(self) -> None:
        """Normal with a deviation of 0.02; of what is added to the stream, less the more blocks add to it."""
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                nn.init.constant_(parameter, float("norm" in name and name.endswith("weight")))
            else:
                added = name.endswith(("out_proj.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * len(self.blocks)) if added else 0.02)

    def _check(self, ids: object, past: int) -> None:
        call, longest = f"GPT got input_ids = {describe(ids)}", self.config.context_length
        if not isinstance(ids, Tensor) or ids.dtype not in (torch.int64, torch.int32):
            raise DTypeError(f"{call}: expected token ids, an integer tensor (B, T).")
        if ids.ndim != 2 or ids.shape[1] == 0:
            raise ShapeError(f"{call}: expected (B, T) with at least one token; of a single text, ids[None].")
        if past + ids.shape[1] > longest:
            after = f" after {past} in the caches" if past else ""
            raise ShapeError(f"{call}{after}: more than context_length={longest}. Pass the last {longest} at most.")
        if has_numbers(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self.config.vocab_size:
            raise ShapeError(
                f"{call} from {int(ids.min())} to {int(ids.max())}: the model has {self.config.vocab_size} tokens, from"
                " 0. Is this its own tokenizer?"
            )


def _norm(config: GPTConfig) -> nn.Module:
    if config.rms_norm:
        return nn.RMSNorm(config.width, eps=config.norm_eps)
    return nn.LayerNorm(config.width, eps=config.norm_eps, bias=config.bias)


def _chosen(logits: Tensor, temperature: float, top_k: int | None) -> Tensor:
    """(B, vocab_size) → (B, 1)."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    if top_k is not None and top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -math.inf)
    below = (logits - logits.amax(-1, keepdim=True)).double()  # so that a low temperature leaves 0 and -inf
    shares = torch.softmax(below / temperature, -1)
    if not bool(shares.isfinite().all()):
        raise ModelError("generate: the logits are not finite: a weight of the model is NaN or infinite.")
    return torch.multinomial(shares, 1)
