"""A name, a Hugging Face id, a folder or a ``.gguf`` file -> (model, tokenizer), ready to be looked into.

Nothing heavy is imported until `load` is called: `available` only looks for packages and folders.
"""

from __future__ import annotations

from clearhead.zoo.catalog import Entry, available
from clearhead.zoo.loading import config, context_length, load

__all__ = ["Entry", "available", "config", "context_length", "load"]
