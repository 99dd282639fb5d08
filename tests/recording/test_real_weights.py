"""Real weights: a head whose task is known, half precision, and a model that adds a bias of positions."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from clearhead import reference
from clearhead.recording import record
from clearhead.testing import assert_close

from .reactions import ATOM, Reaction, read

# --- RXNMapper: the head that knows which atom is which -------------------------------------------

REACTIONS = read()
Head = tuple[int, int]  # layer, head
SPECIAL = ("[CLS]", "[SEP]", "[PAD]")


@pytest.mark.parametrize("reaction", REACTIONS, ids=lambda one: one.name)
def test_the_gold_atom_maps_are_maps(reaction: Reaction) -> None:
    reactants, product = reaction.sides
    gold = reaction.gold
    assert len(set(gold)) == len(gold) == len(product.atoms)
    assert [reactants.elements[was] for was in gold] == product.elements
    kinds = reactants.kinds()
    assert all(kinds.count(kinds[was]) == 1 for was in gold)  # no twins: one answer is right
    bonded = {frozenset(gold[atom] for atom in pair) for pair in product.bonds}
    assert len(bonded - set(reactants.bonds)) == reaction.made


@pytest.fixture(scope="module")
def accuracy(rxnmapper: tuple[Any, Any]) -> dict[Head, float]:
    """For each head, the share of product atoms that it maps to the right atom; all reactions as one padded batch."""
    model, tokenizer = rxnmapper
    inputs = tokenizer([one.smiles for one in REACTIONS], padding=True, return_tensors="pt")
    tokens = [tokenizer.convert_ids_to_tokens(ids) for ids in inputs["input_ids"]]
    assert not any("[UNK]" in each for each in tokens)
    with torch.no_grad(), record(model) as recording:
        model(**inputs)
    atoms = sum(len(one.gold) for one in REACTIONS)
    found: dict[Head, float] = {}
    for layer, attn in enumerate(recording):
        right = sum(hits(weights, *each) for weights, *each in zip(attn.to_dense(), tokens, REACTIONS, strict=True))
        found |= {(layer, head): int(n) / atoms for head, n in enumerate(right)}
    return found


def hits(weights: Tensor, tokens: list[str], reaction: Reaction) -> Tensor:  # (H, T, T) -> (H,)
    """How many product atoms look, of all the reactants' atoms, most at the one that they were."""
    arrow = tokens.index(">>")
    atoms = [at for at, token in enumerate(tokens) if token not in SPECIAL and ATOM.fullmatch(token)]
    before, after = [at for at in atoms if at < arrow], [at for at in atoms if at > arrow]
    looks = weights[:, after][:, :, before].argmax(-1)
    return (looks == torch.tensor(reaction.gold)).sum(-1)


def test_the_head_that_is_published_as_the_mapper_of_atoms_ranks_first(accuracy: dict[Head, float]) -> None:
    """Its margin is that of one atom: ALBERT's layers share their weights, so that head 5 maps in all deep ones."""
    ranked = sorted(accuracy, key=lambda head: -accuracy[head])
    assert ranked[0] == (10, 5)
    assert accuracy[ranked[0]] > accuracy[ranked[1]]


def test_no_head_of_another_number_maps_half_as_well(accuracy: dict[Head, float]) -> None:
    best = max((head for head in accuracy if head[1] != 5), key=lambda head: accuracy[head])
    assert accuracy[best] < accuracy[10, 5] / 2


# --- SmolLM2 in bfloat16 --------------------------------------------------------------------------

TEXT = (
    "The ferryman counted his passengers twice. Nine had come aboard, nine sat down, and yet at the far bank ten stood"
    " on the landing. He counted the coins: there were nine of them, and a button. "
)


@pytest.fixture(scope="module")
def smollm2_half(smollm2: tuple[Any, Any]) -> tuple[Any, Any]:
    """The same weights, rounded to bfloat16."""
    model, tokenizer = smollm2
    return copy.deepcopy(model).to(torch.bfloat16), tokenizer


@pytest.mark.parametrize(
    ("implementation", "tokens"),
    [
        ("sdpa", 24),
        pytest.param("eager", 256, marks=pytest.mark.full),
        pytest.param("sdpa", 256, marks=pytest.mark.full),
    ],
)
def test_trap19_maps_of_a_bfloat16_model_are_exact_for_its_own_q_and_k(
    smollm2_half: tuple[Any, Any], implementation: str, tokens: int
) -> None:
    """Every layer and head, one sequence padded on the left, against float64 of the very same q and k."""
    model, tokenizer = smollm2_half
    model.set_attn_implementation(implementation)
    ids = tokenizer(TEXT * 16, return_tensors="pt").input_ids[:, :tokens].repeat(2, 1)
    real = torch.arange(tokens) >= torch.tensor([[tokens // 4], [0]])
    with torch.no_grad():
        plain = model(ids, attention_mask=real.long()).logits
        with record(model) as recording:
            out = model(ids, attention_mask=real.long()).logits
    assert torch.equal(out, plain)
    visible = reference.causal(tokens, tokens) & real[:, None, None, :] & real[:, None, :, None]
    for label, attn in zip(recording.labels, recording, strict=True):
        assert attn.q.dtype == attn.k.dtype == torch.bfloat16
        exact, rounded = (
            reference.weights(attn.q.to(dtype), attn.k.to(dtype), mask=visible, scale=attn.scale)
            for dtype in (torch.float64, torch.float32)
        )
        scores = reference.scores(attn.q.float(), attn.k.float(), scale=attn.scale)
        assert_close(
            attn.to_dense(),
            exact,
            rounded,
            terms=tokens + attn.q.shape[-1],
            score=float((scores * visible).abs().max()),
            what=label,
        )


# --- MPNet: a bias by relative position, added by code of its own ---------------------------------


def test_trap17_mpnet_in_a_padded_batch_gives_its_own_weights(mpnet: tuple[Any, Any]) -> None:
    model, tokenizer = mpnet
    inputs = tokenizer(["The dog chased the cat", TEXT], padding=True, return_tensors="pt")
    with torch.no_grad():
        plain = model(**inputs, output_attentions=True)
        with record(model) as recording:
            out = model(**inputs)
    assert torch.equal(out.last_hidden_state, plain.last_hidden_state)
    real = inputs["attention_mask"].bool()[:, None, :, None]
    for attn, weights in zip(recording, plain.attentions, strict=True):
        assert torch.equal(attn.to_dense(), weights * real)
