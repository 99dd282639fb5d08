"""All statistics of all heads of SmolLM2 (30 layers of 9 heads), from 512 to 8,192 tokens.

Entropy, distance, weight on the first key and on itself, peak, and attention received with its peak, of every head,
beside the model's own forward pass: PyTorch's fused attention, no cache, logits of the last token alone. Eager
attention, TransformerLens (`run_with_cache` of every pattern) and TorchLens (`record` of every softmax) return every
weight, from which nothing is computed here; where the weights of all layers would take more than 6 GB they are left
out, TorchLens, whose time grows with the number of operations, already above 512 tokens. Tokens are random: times do
not depend on them. attnread 0.1.2 asks for torch 2.14, which the others do not, and is not here.

In the end one question that TransformerLens answers in one call: how much each head attends to the previous token
(`detect_head`, which keeps all that the model computes), on prose. Both must find the same shares.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _peers import peak_of_peer, peers, save
from _report import COLUMNS, Report, row

from clearhead import bench, record, zoo
from clearhead._measuring import alternate, peak_of_child

MODEL, LENGTHS, LONG, MOST = "smollm2", (512, 2048, 4096, 8192), 4096, 6_000_000_000
THEIRS = {"transformer_lens": ("TransformerLens, every pattern", 2048), "torchlens": ("TorchLens, every softmax", 512)}
PREVIOUS, DETECT, TOKENS = "recorded, to the previous token", "TransformerLens, detect_head", 512


def ways(model: Any, tokens: int) -> bench.Ways:
    ids = torch.randint(model.config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(0))
    found = bench.model_ways(model, ids, most=MOST)
    return {name: found[name] for name in (bench.FORWARD, bench.LOOKED, bench.EAGER) if name in found}


def prepare(tokens: int, name: str) -> Callable[[], object]:
    """In a fresh process."""
    torch.set_grad_enabled(False)
    model = zoo.load(MODEL)[0]
    bench.load_weights(model)
    bench.load_loops()
    return ways(model, tokens)[name]


def statistics(report: Report, model: Any, folder: str, tokens: int) -> None:
    """The table of one length."""
    theirs = {name: (way, folder, tokens) for way, (name, most) in THEIRS.items() if tokens <= most}
    with peers(theirs) as (ready, missing):
        found = ways(model, tokens) | ready
        times = alternate(found, rounds=7 if tokens <= LONG else 2, seconds=15, warm=tokens < LONG)
    rows = []
    for name, timing in times.items():
        peak = None  # at 8,192 tokens its processes would take longer than all the rest
        if tokens <= LONG:
            peak = peak_of_peer(*theirs[name]) if name in theirs else peak_of_child(prepare, tokens, name)
        rows.append(row(name, timing, peak))
    report.say(f"{tokens:,} tokens:")
    report.table(COLUMNS, rows)
    for name, why in missing.items():
        report.say(f"{name}: not run ({why}).")


def to_previous(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """(layers, heads): the share of all attention that goes to the previous token."""
    with record(model, keep=lambda _, attn: attn.diagonal(-1)[0].sum(-1) / attn.shape[-1]) as recording:
        model(ids, use_cache=False, logits_to_keep=1)
    return torch.stack(list(recording.results.values()))


def prepare_previous() -> Callable[[], object]:
    """In a fresh process."""
    torch.set_grad_enabled(False)
    model, tokenizer = zoo.load(MODEL)
    bench.load_weights(model)
    bench.load_loops()
    ids = prose(tokenizer)[1]
    return lambda: to_previous(model, ids)


def prose(tokenizer: Any) -> tuple[str, torch.Tensor]:
    """The first words of the licence, and their tokens after the one that TransformerLens begins a text with."""
    text = (Path(__file__).parent.parent / "LICENSE").read_text()
    text = text[: tokenizer(text, return_offsets_mapping=True)["offset_mapping"][TOKENS - 2][1]]
    return text, torch.tensor([[tokenizer.bos_token_id, *tokenizer(text)["input_ids"]]])


def one_role(report: Report, model: Any, tokenizer: Any, folder: str) -> None:
    text, ids = prose(tokenizer)
    with peers({DETECT: ("detect_head", folder, text)}) as (ready, missing):
        for peer in ready.values():
            torch.testing.assert_close(to_previous(model, ids), torch.tensor(peer()), atol=1e-4, rtol=0)
        times = alternate({PREVIOUS: lambda: to_previous(model, ids)} | ready, rounds=7, seconds=15)
    peaks = (peak_of_child(prepare_previous), *(peak_of_peer("detect_head", folder, text) for _ in ready))
    report.say(f"The previous token, {ids.shape[1]} tokens of prose:")
    report.table(COLUMNS, [row(name, times[name], peak) for name, peak in zip(times, peaks, strict=True)])
    for name, why in missing.items():
        report.say(f"{name}: not run ({why}).")


def main() -> None:
    with Report(__file__, "All statistics of all heads of a model") as report, tempfile.TemporaryDirectory() as folder:
        model, tokenizer = zoo.load(MODEL)
        save(model, tokenizer, folder)
        for tokens in LENGTHS:
            statistics(report, model, folder, tokens)
        one_role(report, model, tokenizer, folder)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
