"""What other libraries do with a model, run by the python of .venv-peers; `_peers.py` starts it and tells it when.

Called with a library's way and a JSON list that it is prepared with. Each line on stdin, a JSON list of what to run it
with, is answered by a line of JSON: what was found, or where the third argument is "peak" the bytes that it took.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from clearhead._measuring import _peak

Way = Callable[..., Any]


def ids_of(model: Any, tokens: int) -> torch.Tensor:
    """Those of `every_head.py` and `one_row.py`."""
    return torch.randint(model.config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(0))


def read(model: Any) -> Any:
    """The model, every weight read once: those of a mapped file come when they are first read."""
    for weights in model.parameters():
        weights.sum()
    return model


# --- TransformerLens ----------------------------------------------------------------------------------------------


def bridge(folder: str) -> Any:
    from transformer_lens import TransformerBridge

    return read(TransformerBridge.boot_transformers(folder, device="cpu"))


def transformer_lens(folder: str, tokens: int, layer: int | None = None) -> Way:
    """Every pattern, or the pattern of one layer, and no layer after it."""
    model = bridge(folder)
    ids = ids_of(model.original_model, tokens)
    kept = "hook_pattern" if layer is None else f"blocks.{layer}.attn.hook_pattern"
    stop = None if layer is None else layer + 1

    def run() -> None:
        _, cache = model.run_with_cache(ids, names_filter=lambda name: name.endswith(kept), stop_at_layer=stop)
        expect(cache, 1 if stop else model.cfg.n_layers)

    return run


def detect_head(folder: str, text: str) -> Way:
    """How much each head attends to the previous token."""
    from transformer_lens.head_detector import detect_head as detect

    model = bridge(folder)
    return lambda: detect(model, text, "previous_token_head").tolist()


# --- TorchLens ----------------------------------------------------------------------------------------------------


def torchlens(folder: str, tokens: int) -> Way:
    """Every softmax of the eager model."""
    import torchlens as lens
    from transformers import AutoModelForCausalLM

    model = read(AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval())
    ids, more = ids_of(model, tokens), {"use_cache": False, "logits_to_keep": 1}

    def run() -> None:
        kept = lens.record(model, ids, more, save=lens.func("softmax"))
        expect(kept, model.config.num_hidden_layers)

    return run


# --- pages --------------------------------------------------------------------------------------------------------


def bertviz(folder: str) -> Way:
    """The model view of all heads, or of some of the first layer."""
    from bertviz import model_view

    def view(attention: Any, tokens: list[str], heads: list[int]) -> int:
        only = {"include_layers": [0], "include_heads": heads} if heads else {}
        return len(model_view(attention, tokens, html_action="return", **only).data)

    return page(folder, view)


def circuitsvis(folder: str) -> Way:
    """The heads of each layer, or some of the first; their script comes from the network and is not counted."""
    from circuitsvis.attention import attention_heads

    def view(attention: Any, tokens: list[str], heads: list[int]) -> int:
        layers = [attention[0][0, heads]] if heads else [layer[0] for layer in attention]
        return sum(len(str(attention_heads(attention=layer, tokens=tokens))) for layer in layers)

    return page(folder, view)


def page(folder: str, view: Callable[[Any, list[str], list[int]], int]) -> Way:
    """Seconds of the eager model, seconds of the view, and its bytes."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = read(AutoModel.from_pretrained(folder, attn_implementation="eager").eval())

    def run(text: str, heads: list[int]) -> tuple[float, float, int]:
        start = time.perf_counter()
        inputs = tokenizer(text, return_tensors="pt")
        attention = model(**inputs, output_attentions=True).attentions
        tokens, middle = tokenizer.convert_ids_to_tokens(inputs["input_ids"][0]), time.perf_counter()
        nbytes = view(attention, tokens, heads)
        return middle - start, time.perf_counter() - middle, nbytes

    return run


# --- what is said and done ----------------------------------------------------------------------------------------


def expect(found: Any, many: int) -> None:
    """A library that keeps something else than was asked for must not be timed."""
    if len(found) != many:
        raise ValueError(f"{len(found)} attention patterns were kept, {many} were expected")


def answers(way: str, given: str, what: str) -> Iterator[Any]:
    """None when all is prepared; then what each run found, or the bytes that it took."""
    run = globals()[way](*json.loads(given))
    yield None
    for line in sys.stdin:
        once = partial(run, *json.loads(line))
        yield _peak(lambda once=once: once, ()) if what == "peak" else once()
        gc.collect()  # what this turn left is not the next one's to clear away


def main(way: str, given: str, what: str) -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is no answer
    try:
        for found in answers(way, given, what):
            print(json.dumps({"found": found}), file=out, flush=True)
    except Exception as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=out, flush=True)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main(*sys.argv[1:])
