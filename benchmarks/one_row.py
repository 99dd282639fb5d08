"""One row of weights of one head, when the model has run: how long until it is there.

SmolLM2 on 2,048 tokens, head 5 of layer 17, last token. Of a recorded model the row is one product of a query with the
keys; so it is of a layer that nobody has looked at yet, and one weight of each of its heads takes one such row of each.
Otherwise the model runs again: with eager attention, which gives all rows of all heads, or in TransformerLens, which
keeps the pattern of that layer alone and runs no layer after it. First, the same row by hand, from q and k that
somebody has kept: there is no less than that.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from _peers import peers, save
from _report import COLUMNS, Report, row

from clearhead import SoftmaxMap, bench, record, zoo
from clearhead._measuring import alternate

MODEL, TOKENS, LAYER, HEAD = "smollm2", 2048, 17, 5
LENS = "the layer again, TransformerLens"


def ways(model: Any) -> bench.Ways:
    ids = torch.randint(model.config.vocab_size, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    run = bench.model_ways(model, ids, most=10**10)
    with record(model) as recording:
        model(ids, use_cache=False, logits_to_keep=1)
    attn = recording[LAYER]
    assert isinstance(attn, SoftmaxMap)
    q, k = attn._q[0, HEAD, -1], attn._k[0, HEAD // (attn._q.shape[1] // attn._k.shape[1])]

    def by_hand() -> torch.Tensor:
        return torch.softmax(k @ q * attn.scale, -1)

    def unread() -> SoftmaxMap:
        return SoftmaxMap(attn._q, attn._k, mask=attn.mask, scale=attn.scale)

    torch.testing.assert_close(attn[0, HEAD, -1], by_hand())
    return {
        "by hand, from q and k": by_hand,
        "recorded": lambda: attn[0, HEAD, -1],
        "recorded, the first look": lambda: unread()[0, HEAD, -1],
        "recorded, the first look, a weight of each head": lambda: unread().pick(-1, 0),
        "recorded, every row of the head": lambda: attn[0, HEAD].to_dense(),
        "the model again, eager": run[bench.EAGER],
    }


def main() -> None:
    with Report(__file__, "One row of one head, after the fact") as report, tempfile.TemporaryDirectory() as folder:
        model, tokenizer = zoo.load(MODEL)
        save(model, tokenizer, folder)
        with peers({LENS: ("transformer_lens", folder, TOKENS, LAYER)}) as (ready, missing):
            times = alternate(ways(model) | ready, seconds=20)
        report.table(COLUMNS[:-1], [row(*found, None)[:-1] for found in times.items()])
        for name, why in missing.items():
            report.say(f"{name}: not run ({why}).")


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
