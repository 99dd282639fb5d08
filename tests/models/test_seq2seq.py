"""Encoder-decoders: what they may see, writing word by word, and the maps of what they look at."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import clearhead
from clearhead import DTypeError, ShapeError, reference
from clearhead.models import Seq2Seq, fit
from clearhead.models.recurrent import RecurrentDecoder, summary
from clearhead.models.seq2seq import END, PAD
from clearhead.nn import AdditiveAttention

WIDTH, SOURCES, TARGETS = 8, 9, 7
SOURCE = torch.tensor([[3, 4, 5, 6], [7, 8, 0, 0]])
TARGET = torch.tensor([[1, 3, 4, 6, 2], [1, 5, 2, 0, 0]])


def make(name: str, **how: float) -> Seq2Seq:
    torch.manual_seed(0)
    return getattr(Seq2Seq, name)(SOURCES, TARGETS, WIDTH, **how).double().eval()


NAMES = ("bottleneck", "attentive", "transformer")


@pytest.fixture(params=NAMES)
def model(request: pytest.FixtureRequest) -> Seq2Seq:
    return make(request.param)


def test_a_text_is_read_as_if_its_padding_and_its_neighbours_were_not_there(model: Seq2Seq) -> None:
    together, alone = model(SOURCE, TARGET), model(SOURCE[1:, :2], TARGET[1:, :3])
    torch.testing.assert_close(together[1:, :3], alone)


def test_a_word_is_guessed_from_those_before_it(model: Seq2Seq) -> None:
    other = TARGET.clone()
    other[0, 3] = 5
    before, after = (model(SOURCE, target)[0] for target in (TARGET, other))
    torch.testing.assert_close(before[:3], after[:3], rtol=0, atol=1e-15)
    assert (before[3] - after[3]).abs().max() > 1e-3


def test_every_word_of_the_source_counts(model: Seq2Seq) -> None:
    for place in range(4):
        other = SOURCE.clone()
        other[0, place] = 8
        assert (model(SOURCE, TARGET) - model(other, TARGET))[0].abs().max() > 1e-5


def test_writing_is_the_likeliest_word_after_the_other_until_the_end(model: Seq2Seq) -> None:
    with torch.no_grad():
        model.decoder.out.bias[END] += 0.4  # so that some texts end, and some do not
    written = model.generate(SOURCE, 6)
    guessed = model(SOURCE, torch.cat([torch.ones(2, 1).long(), written], 1)[:, :-1]).argmax(-1)
    for row, guess in zip(written.tolist(), guessed.tolist(), strict=True):
        length = row.index(END) + 1 if END in row else len(row)
        assert row[:length] == guess[:length]
        assert set(row[length:]) <= {PAD}
    assert torch.equal(model.generate(SOURCE, 3), written[:, :3])


def test_the_loss_is_of_real_words_alone(model: Seq2Seq) -> None:
    terms = model(SOURCE, TARGET[:, :-1]).log_softmax(-1).gather(2, TARGET[:, 1:, None])[..., 0]
    real = TARGET[:, 1:] != PAD
    torch.testing.assert_close(model.loss(SOURCE, TARGET), -terms[real].mean())


@pytest.mark.parametrize(("name", "count", "heads"), [("bottleneck", 0, 0), ("attentive", 1, 1), ("transformer", 2, 4)])
def test_attend_gives_the_logits_and_a_map_for_each_layer_that_looks_at_the_source(
    name: str, count: int, heads: int
) -> None:
    model = make(name)
    logits, maps = model.attend(SOURCE, TARGET)
    assert torch.equal(logits, model(SOURCE, TARGET))
    assert [attn.shape for attn in maps] == [(2, heads, 5, 4)] * count
    for attn in maps:
        dense = attn.to_dense()
        torch.testing.assert_close(dense.sum(-1), torch.ones(2, heads, 5).double())
        assert (dense[1, ..., 2:] == 0).all()


def test_a_recording_holds_the_same_alignments() -> None:
    model = make("transformer")
    with clearhead.record(model) as recording:
        out = model(SOURCE, TARGET)
    logits, maps = model.attend(SOURCE, TARGET)
    torch.testing.assert_close(out, logits)
    assert [len(side) for side in (recording.encoder, recording.decoder, recording.cross)] == [2, 2, 2]
    for recorded, attn in zip(recording.cross, maps, strict=True):
        torch.testing.assert_close(recorded.to_dense(), attn.to_dense())


# --- the recurrent decoder -----------------------------------------------------------------------------------------


def by_hand(decoder: RecurrentDecoder, states: Tensor, y: Tensor, fixed: Tensor | None) -> tuple[Tensor, Tensor]:
    """Of one sentence, by the paper: logits, and the weights of each step."""
    s, logits, shares = torch.tanh(decoder.start(torch.cat([states[-1, :WIDTH], states[0, WIDTH:]]))), [], []
    for word in decoder.embedding(y):
        context = fixed
        if decoder.attention is not None:
            layer = decoder.attention
            scores = reference.additive_scores(
                s[None], states, layer.W_query.weight.T, layer.W_key.weight.T, layer.score.weight[0]
            )
            shares.append(reference.softmax(scores)[0])
            context = shares[-1] @ states
        s = decoder.cell(torch.cat([word, context])[None], s[None])[0]
        logits.append(decoder.out(torch.tanh(decoder.readout(torch.cat([s, context, word])))))
    return torch.stack(logits), torch.stack(shares) if shares else states.new_zeros(0)


def test_requirement_02_and_03_the_state_before_a_word_asks_all_states_of_the_encoder() -> None:
    model = make("attentive")
    states = model.encoder(SOURCE, SOURCE != PAD)
    logits, (attn,) = model.attend(SOURCE, TARGET)
    want, shares = by_hand(model.decoder, states[0], TARGET[0], None)
    torch.testing.assert_close(logits[0], want)
    torch.testing.assert_close(attn.to_dense()[0, 0], shares)
    want, shares = by_hand(model.decoder, states[1, :2], TARGET[1], None)
    torch.testing.assert_close(logits[1], want)
    torch.testing.assert_close(attn.to_dense()[1, 0, :, :2], shares)


def test_requirement_02_with_the_last_states_for_context_it_is_the_plain_encoder_decoder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain, attentive = make("bottleneck"), make("attentive")
    attentive.load_state_dict(attentive.state_dict() | plain.state_dict())
    assert (attentive(SOURCE, TARGET) - plain(SOURCE, TARGET)).abs().max() > 1e-3
    last = summary(plain.encoder(SOURCE, SOURCE != PAD), SOURCE != PAD)
    monkeypatch.setattr(AdditiveAttention, "forward", lambda *_, **__: last[:, None])
    assert torch.equal(attentive(SOURCE, TARGET), plain(SOURCE, TARGET))
    torch.testing.assert_close(
        plain(SOURCE, TARGET)[1],
        by_hand(plain.decoder, plain.encoder(SOURCE, SOURCE != PAD)[1, :2], TARGET[1], last[1])[0],
    )


# --- training, and bad input ---------------------------------------------------------------------------------------


def test_one_loop_trains_all_three() -> None:
    for name in NAMES:
        torch.manual_seed(0)
        model = getattr(Seq2Seq, name)(SOURCES, TARGETS, 16)
        losses = fit(
            model, lambda ids, model=model: model.loss(*ids), lambda n: (SOURCE, TARGET), steps=12, rate=3e-2, warmup=1
        )
        assert losses[-1] < 0.5 * losses[0], name
        assert all(parameter.grad is None or bool(parameter.grad.any()) for parameter in model.parameters())
        model.loss(SOURCE, TARGET).backward()
        assert all(parameter.grad is not None for parameter in model.parameters())


BAD: dict[str, tuple[type[Exception], str, Callable[[Seq2Seq], object]]] = {
    "words": (DTypeError, r"source=list\): expected token ids", lambda model: model([["es", "ist"]], TARGET)),
    "floats": (DTypeError, "expected token ids", lambda model: model(SOURCE.float(), TARGET)),
    "one text": (ShapeError, r"one text is ids\[None\]", lambda model: model(SOURCE[0], TARGET)),
    "no text": (ShapeError, "at least one text", lambda model: model.generate(SOURCE[:0])),
    "too high": (ShapeError, "6 to 9; the model was made for 9 source tokens", lambda m: m(SOURCE[:1] + 3, TARGET[:1])),
    "another batch": (ShapeError, "expected one batch size", lambda model: model(SOURCE[:1], TARGET)),
    "padded before": (ShapeError, "pad at the end", lambda model: model(SOURCE.flip(1), TARGET)),
    "padded inside": (ShapeError, "pad at the end", lambda model: model(SOURCE * (SOURCE != 4), TARGET)),
    "nothing to write": (ShapeError, "max_tokens=0", lambda model: model.generate(SOURCE, 0)),
    "no width": (ShapeError, r"Seq2Seq.attentive\(width=0\)", lambda _: Seq2Seq.attentive(9, 9, 0)),
    "no words": (ShapeError, r"target_tokens=2\): expected an integer >= 3", lambda _: Seq2Seq.bottleneck(9, 2)),
    "heads": (ShapeError, "3 heads do not divide", lambda _: Seq2Seq.transformer(9, 9, 8, num_heads=3)),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_named(what: str) -> None:
    kind, message, call = BAD[what]
    with pytest.raises(kind, match=message):
        call(make("attentive"))
