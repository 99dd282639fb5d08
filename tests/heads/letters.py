"""A tokenizer whose tokens are letters, a small model that reads them; and, as a script, an atlas in its own process.

python letters.py workers out|resume FOLDER RESULT [FILE…]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SETTINGS: dict[str, Any] = {"window": 16, "overlap": 4, "at_once": 64}
LONG = ["the cat sat on the mat " * 180]


class Letters:
    """Called as those of Hugging Face are; `seen` are the texts that it was given without special tokens."""

    pad_token_id = None

    def __init__(self, *, before: Sequence[int] = (), after: Sequence[int] = (), vocabulary: int = 1 << 21) -> None:
        self.before, self.after, self.vocabulary = list(before), list(after), vocabulary
        self.seen: list[str] = []

    def __call__(self, text: str, *, add_special_tokens: bool = True, verbose: bool = True) -> dict[str, list[int]]:
        ids = [ord(letter) % self.vocabulary for letter in text]
        if add_special_tokens:
            return {"input_ids": [*self.before, *ids, *self.after]}
        if text != "a":
            self.seen.append(text)
        return {"input_ids": ids}


def llama(seed: int = 0) -> Any:
    """In float64, for 64 tokens."""
    import torch
    import transformers

    torch.manual_seed(seed)
    config = transformers.LlamaConfig(vocab_size=64, num_key_value_heads=2, max_position_embeddings=64, **SIZES)
    return transformers.LlamaForCausalLM(config).double().eval()


def main() -> None:
    workers, how, folder, result, *files = sys.argv[1:]
    import_module("clearhead.heads.atlas").SAVED = -1.0
    from clearhead.heads import atlas

    found = atlas(
        llama(),
        Letters(vocabulary=64),
        [Path(file) for file in files] or LONG,
        workers=int(workers),
        on_progress=lambda *told: print(*told, flush=True),
        **{how: folder},
        **SETTINGS,
    )
    found.save(result)


if __name__ == "__main__":
    main()
