"""Writing tokens with a KV cache against reading the whole text again for each, with a GPT made of our layers.

The size of GPT-2 (12 layers, 768 wide, 12 heads), random weights: the time does not depend on them. Both ways must
write the same tokens, or the run ends with an error.
"""

from __future__ import annotations

import time

import torch
from _report import Report
from torch import Tensor, nn

from clearhead.nn import Attention, KVCache

LAYERS, WIDTH, HEADS, VOCABULARY, PROMPT, NEW = 12, 768, 12, 50257, 256, 32


class Block(nn.Module):
    """Attention and a feed-forward network, each after a normalisation and around a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention(WIDTH, WIDTH, 1024, num_heads=HEADS, qkv_bias=True)
        self.forward_norm = nn.LayerNorm(WIDTH)
        self.feed = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor, cache: KVCache | None) -> Tensor:
        x = x + self.attention(self.norm(x), cache=cache)
        return x + self.feed(self.forward_norm(x))


class GPT(nn.Module):
    """Tokens and positions in, logits of the next token out."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(1024, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)  # larger, and the last token would always be drawn again

    def new_caches(self) -> list[KVCache]:
        return [block.attention.new_cache(1, PROMPT + NEW) for block in self.blocks]

    def forward(self, ids: Tensor, caches: list[KVCache] | None = None) -> Tensor:
        past = caches[0].tokens if caches else 0
        x = self.tokens(ids) + self.positions(torch.arange(past, past + ids.shape[1]))
        for block, cache in zip(self.blocks, caches or [None] * LAYERS, strict=True):
            x = block(x, cache)
        return self.norm(x[:, -1:]) @ self.tokens.weight.T


@torch.inference_mode()
def write(model: GPT, prompt: Tensor, *, cached: bool) -> tuple[list[int], float]:
    """Tokens drawn after the prompt, always with the same dice, and how many a second."""
    ids, caches, start = prompt, model.new_caches() if cached else None, time.perf_counter()
    dice = torch.Generator().manual_seed(0)
    for _ in range(NEW):
        given = ids[:, caches[0].tokens :] if caches else ids
        drawn = torch.multinomial(model(given, caches)[:, -1].softmax(-1), 1, generator=dice)
        ids = torch.cat([ids, drawn], 1)
    return ids[0, PROMPT:].tolist(), NEW / (time.perf_counter() - start)


def main() -> None:
    torch.manual_seed(0)
    model, prompt = GPT().eval(), torch.randint(VOCABULARY, (1, PROMPT))
    write(model, prompt, cached=True)
    (again, slow), (cached, fast) = (write(model, prompt, cached=how) for how in (False, True))
    if again != cached:
        raise SystemExit(f"the cache changes the text: {again} without, {cached} with it")
    with Report(__file__, "Writing with a cache") as report:
        report.say(f"{NEW} tokens after {PROMPT}, the same {len(set(cached))} different ones both ways.")
        rows = [
            ["the whole text again for each", f"{slow:.2f}", "1.0"],
            ["a cache", f"{fast:.2f}", f"{fast / slow:.1f}"],
        ]
        report.table(["", "tokens/s", "ratio"], rows)


if __name__ == "__main__":
    main()
