"""Models made of the layers in `clearhead.nn`, to prove that they slot in, and one loop that trains them."""

from clearhead.models.checkpoints import Checkpoints
from clearhead.models.gpt import GPT, GPTConfig
from clearhead.models.pairs import Vocabulary, ding_pairs, read_pairs
from clearhead.models.seq2seq import Seq2Seq
from clearhead.models.training import fit, rate_at
from clearhead.models.translator import Translator

__all__ = [
    "GPT",
    "Checkpoints",
    "GPTConfig",
    "Seq2Seq",
    "Translator",
    "Vocabulary",
    "ding_pairs",
    "fit",
    "rate_at",
    "read_pairs",
]
