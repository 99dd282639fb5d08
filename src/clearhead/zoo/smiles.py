"""Reading SMILES for RXNMapper, from its package's own pattern and vocabulary, without importing the package.

Importing it would need RDKit, pandas and an older transformers; the two facts needed are in its files.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING

from clearhead.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_PATTERN = "SMI_REGEX_PATTERN"
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def smiles_tokenizer(model: Path) -> PreTrainedTokenizerFast:
    """A tokenizer that splits SMILES into atoms, bonds, brackets and ``>>``: ``[CLS] ... [SEP]`` around them.

    What the pattern does not know becomes ``[UNK]``, so that nothing of the text vanishes.

    Args:
        model: the folder in the package that holds ``vocab.txt``
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = _vocabulary(model / "vocab.txt")
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(_pattern(model.parents[2])), "isolated")
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", vocabulary["[SEP]"]), ("[CLS]", vocabulary["[CLS]"]))
    tokenizer.decoder = decoders.Fuse()
    pad, unk, cls, sep, mask = _SPECIAL
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=512,
        pad_token=pad,
        unk_token=unk,
        cls_token=cls,
        sep_token=sep,
        mask_token=mask,
    )


def _vocabulary(file: Path) -> dict[str, int]:
    vocabulary = {line: index for index, line in enumerate(file.read_text("utf-8").splitlines())}
    missing = [token for token in _SPECIAL if token not in vocabulary]
    if missing:
        raise ModelError(f"{file} is not RXNMapper's vocabulary: it lacks {', '.join(missing)}")
    return vocabulary


def _pattern(package: Path) -> str:
    source = package / "smiles_utils.py"
    for statement in ast.parse(source.read_text("utf-8")).body:
        if isinstance(statement, ast.Assign) and _PATTERN in map(ast.unparse, statement.targets):
            return str(ast.literal_eval(statement.value))
    raise ModelError(f"{source} has no {_PATTERN}: this is not the package rxnmapper==0.4.3")
