"""Models made of the layers in `clearhead.nn`, to prove that they slot in, and one loop that trains them."""

from clearhead.models.checkpoints import Checkpoints
from clearhead.models.gpt import GPT, GPTConfig
from clearhead.models.training import fit, rate_at

__all__ = ["GPT", "Checkpoints", "GPTConfig", "fit", "rate_at"]
