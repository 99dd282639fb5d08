"""The heads of SmolLM2 that continue what was said before, and what the model loses without them.

The probe of Olsson et al. 2022: 128 random tokens, and the same 128 again. A head's score is the mean share of its
attention on the tokens that came after earlier copies of the query's token. The eight heads that have most are set to
zero, and so are eight others, drawn at random 20 times. The loss is that of the second 128 tokens, on other random
tokens than those that the heads were chosen by; then that of running text, with the score of in-context learning: the
loss around token 500 less that around token 50, in nats, so the lower the better. `make peers` gets the texts.
"""

from __future__ import annotations

from statistics import fmean, stdev

import _brown
import torch
from _report import Report

from clearhead import record, zoo
from clearhead.heads import Effect, Tokens, effect, relation_score

MODEL, HALF, SEQUENCES, TOP, DRAWS, TEXTS = "smollm2", 128, 4, 8, 20, 16


def repeated(vocabulary: int, seed: int) -> torch.Tensor:
    """(SEQUENCES, 2 · HALF)"""
    half = torch.randint(100, vocabulary, (SEQUENCES, HALF), generator=torch.Generator().manual_seed(seed))
    return torch.cat([half, half], 1)


def induction_scores(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """The mass of every head, (L, H)."""
    probes = []
    for one in ids:
        with record(model) as recording:
            model(one[None], use_cache=False, logits_to_keep=1)
        probes.append((list(recording), Tokens(one).induction()))
    return relation_score(probes).mass


def strongest(scores: torch.Tensor) -> list[tuple[int, int]]:
    return [divmod(int(n), scores.shape[1]) for n in scores.flatten().topk(TOP).indices]


def rows(found: Effect, what: str) -> list[list[str]]:
    random = [one.change for one in found.random]
    told = [[f"{what}, all heads", f"{found.whole.loss:.3f}", "", _score([found.whole.icl])]]
    told += [[f"{what}, without the {TOP}", f"{found.without.loss:.3f}", f"{found.change:+.3f}"]]
    told[1] += [_score([found.without.icl])]
    loss = fmean(one.loss for one in found.random)
    spread = f"{fmean(random):+.3f} ± {stdev(random):.3f}"
    told += [[f"{what}, without {TOP} at random", f"{loss:.3f}", spread, _score([one.icl for one in found.random])]]
    return told


def _score(found: list[float | None]) -> str:
    scores = [one for one in found if one is not None]
    if not scores:
        return "-"
    return f"{fmean(scores):+.3f}" + (f" ± {stdev(scores):.3f}" if len(scores) > 1 else "")


def main() -> None:
    with Report(__file__, "Induction heads, and what a model loses without them") as report:
        model, tokenizer = zoo.load(MODEL)
        scores = induction_scores(model, repeated(model.config.vocab_size, seed=1))
        heads = strongest(scores)
        said = ", ".join(f"L{layer}H{head} {scores[layer, head]:.2f}" for layer, head in heads)
        report.say(f"Most attention on what came after earlier copies: {said}; of all heads {scores.mean():.3f}.")
        ids = repeated(model.config.vocab_size, seed=0)
        found = rows(effect(model, None, ids, heads, draws=DRAWS, skip=HALF), "repeated")
        texts = [_brown.text(sample) for sample in _brown.samples()[::31][:TEXTS]]
        if texts:
            ids = torch.stack([tokenizer(text, return_tensors="pt")["input_ids"][0, :512] for text in texts])
            found += rows(effect(model, None, ids, heads, draws=DRAWS), "text")
        report.table(["", "loss", "more", "in context"], found)
        if not texts:
            report.say(_brown.MISSING)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
