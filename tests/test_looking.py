"""`look` on each kind of model: two texts, an image, text that goes on, a batch; and several views at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import clearhead
from clearhead import ModelError, ShapeError, SoftmaxMap, Views
from clearhead.looking.items import of_item
from clearhead.maps import Stitched
from clearhead.masks import causal

transformers = pytest.importorskip("transformers")

SOURCE, TARGET = "The storm had not come, she wrote.", "The lamp was lit."


def eager(model: Any, **inputs: Tensor) -> Any:
    """The weights as transformers computes them, written out."""
    implementation = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.no_grad():
        out = model(**inputs, output_attentions=True)
    model.set_attn_implementation(implementation)
    return out


# --- two texts ----------------------------------------------------------------------------------------------------


def test_a_translator_has_eager_weights_between_its_two_texts(translator: Any, wordpieces: Any) -> None:
    view = clearhead.look(translator, wordpieces, SOURCE, target=TARGET)
    source, target = view.texts
    assert (source.name, target.name, view.sides) == ("source", "target", ["encoder", "decoder", "cross"])
    assert target.pieces[0] == "[CLS]"  # what the decoder starts with; the last token of the target is never read
    out = eager(translator, input_ids=source.ids[None], decoder_input_ids=target.ids[None])
    for attn, weights in zip(
        view.maps, (out.encoder_attentions, out.decoder_attentions, out.cross_attentions), strict=True
    ):
        torch.testing.assert_close(attn.to_dense(), weights[0], atol=1e-6, rtol=1e-5)
    assert view.maps[2].shape == (1, 2, len(target), len(source))


def test_a_translator_writes_the_likeliest_target_where_none_is_given(translator: Any, wordpieces: Any) -> None:
    view = clearhead.look(translator, wordpieces, SOURCE, generate=6)
    with torch.no_grad():
        encoded = wordpieces(SOURCE, return_tensors="pt")["input_ids"]
        for n in range(1, len(view.texts[1])):
            read = view.texts[1].ids[None, :n]
            logits = translator(input_ids=encoded, decoder_input_ids=read).logits[0, -1]
            logits[0] = -torch.inf  # the padding token, which is never written
            assert int(logits.argmax()) == int(view.texts[1].ids[n])


def test_heads_of_cross_attention_have_roles_of_their_own(translator: Any, wordpieces: Any) -> None:
    heads = clearhead.look(translator, wordpieces, SOURCE, target=TARGET).heads()
    cross = [head for head in heads if head.layer == 2]
    assert all(head.scores.keys() == {"sink", "aligned", "broad"} for head in cross)
    assert {head.role for head in cross} <= {"sink", "aligned", "broad", "other"}
    assert all(head.distance is None for head in cross)
    assert "aligned" in heads.counts()


@pytest.mark.parametrize(("layers", "shapes"), [([0], 1), ([1], 1), ([2], 2), ([0, 2], 2)])
def test_layers_of_one_side_alone_are_a_view_of_its_text(
    translator: Any, wordpieces: Any, layers: list[int], shapes: int, tmp_path: Path
) -> None:
    view = clearhead.look(translator, wordpieces, SOURCE, target=TARGET, layers=layers)
    assert view.layers == layers
    assert len(view.texts) == shapes
    assert view.save(tmp_path / "page.html").exists()


def test_a_target_for_a_model_of_one_text(writer: Any, wordpieces: Any) -> None:
    with pytest.raises(ModelError, match="reads one text"):
        clearhead.look(writer, wordpieces, SOURCE, target=TARGET)


@pytest.mark.parametrize(("target", "said"), [("two", "one target"), (["one"], "1 targets")])
def test_texts_with_another_number_of_targets(translator: Any, wordpieces: Any, target: Any, said: str) -> None:
    with pytest.raises(ShapeError, match=f"2 texts, and {said}; expected a list of as many"):
        clearhead.look(translator, wordpieces, [SOURCE, SOURCE], target=target)


def test_a_view_of_two_texts_is_saved_and_opened(translator: Any, wordpieces: Any, tmp_path: Path) -> None:
    view = clearhead.look(translator, wordpieces, SOURCE, target=TARGET)
    again = clearhead.View.open(view.save_recording(tmp_path / "run"))
    assert [text.pieces for text in again.texts] == [text.pieces for text in view.texts]
    assert again.sides == view.sides
    torch.testing.assert_close(again.maps[2].to_dense(), view.maps[2].to_dense(), atol=0, rtol=0)
    assert [head.role for head in again.heads()] == [head.role for head in view.heads()]


# --- an image -----------------------------------------------------------------------------------------------------


def shapes_image() -> np.ndarray:
    image = np.zeros((32, 32, 3), np.uint8)
    image[8:24, 8:24] = (200, 60, 20)
    return image


def test_an_image_is_patches_with_the_weights_of_eager_attention(painter: Any, tmp_path: Path) -> None:
    processor = transformers.ViTImageProcessorPil(size={"height": 32, "width": 32})
    view = clearhead.look(painter, processor, shapes_image())
    picture = view.texts[0].picture
    assert picture is not None
    assert (picture.rows, picture.columns, picture.first) == (4, 4, 1)
    assert view.tokens[:3] == ["[CLS]", " (0, 0)", " (0, 1)"]
    pixels = processor(images=shapes_image(), return_tensors="pt")["pixel_values"]
    weights = eager(painter, pixel_values=pixels).attentions[0]
    torch.testing.assert_close(view.maps[0].to_dense(), weights, atol=1e-6, rtol=1e-5)
    assert view.heads()[0].scores.keys() == {"first", "sink", "self", "local", "broad"}
    again = clearhead.View.open(view.save_recording(tmp_path / "run"))
    assert again.texts[0].picture == picture


def test_an_image_may_be_a_file_and_what_is_none_is_said(painter: Any, tmp_path: Path) -> None:
    from PIL import Image

    processor = transformers.ViTImageProcessorPil(size={"height": 32, "width": 32})
    Image.fromarray(shapes_image()).save(tmp_path / "shapes.png")
    view = clearhead.look(painter, processor, str(tmp_path / "shapes.png"))
    torch.testing.assert_close(
        view.maps[0].to_dense(), clearhead.look(painter, processor, shapes_image()).maps[0].to_dense()
    )
    (tmp_path / "text.png").write_text("no image")
    with pytest.raises(ModelError, match="is no image that Pillow can read"):
        clearhead.look(painter, processor, tmp_path / "text.png")
    with pytest.raises(ModelError, match="cannot read the image"):
        clearhead.look(painter, processor, tmp_path / "missing.png")
    with pytest.raises(ModelError, match="expected an image, its file or an array, got"):
        clearhead.look(painter, processor, 3)


# --- text that goes on --------------------------------------------------------------------------------------------


def test_the_prompt_and_what_the_model_wrote_are_told_apart(writer: Any, wordpieces: Any) -> None:
    view = clearhead.look(writer, wordpieces, SOURCE, generate=4)
    text, given = view.texts[0], wordpieces(SOURCE)["input_ids"]
    assert text.prompt == len(given)
    assert text.ids.tolist()[: len(given)] == given
    assert 1 <= len(text) - len(given) <= 4
    with torch.no_grad():
        logits = writer(input_ids=text.ids[None, :-1]).logits[0]
    written = logits[len(given) - 1 :].argmax(-1).tolist()
    assert text.ids.tolist()[len(given) :] == written
    assert view.maps[0].shape[-1] == len(text)
    assert view.maps[0].v is not None  # so that the page derives every weight


def test_a_recorded_generation_is_a_view(writer: Any, wordpieces: Any) -> None:
    inputs = wordpieces([SOURCE], return_tensors="pt")["input_ids"]
    with clearhead.record(writer) as recording:
        ids = writer.generate(inputs, max_new_tokens=4, do_sample=False, attention_mask=torch.ones_like(inputs))
    (view,) = clearhead.look(recording, wordpieces, ids)
    assert view.texts[0].prompt == inputs.shape[1]
    assert len(view.texts[0]) == ids.shape[1] - 1  # the newest token never was a query
    weights = eager(writer, input_ids=ids[:, :-1]).attentions
    torch.testing.assert_close(view.maps[1].to_dense(), weights[1], atol=1e-6, rtol=1e-4)


# --- a batch ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["left", "right"])
def test_an_item_of_a_batch_is_what_it_would_be_alone(writer: Any, wordpieces: Any, side: str) -> None:
    texts = [SOURCE, TARGET]
    found = [wordpieces(text)["input_ids"] for text in texts]
    width = max(map(len, found))
    pad = [[0] * (width - len(ids)) for ids in found]
    rows = [more + ids if side == "left" else ids + more for ids, more in zip(found, pad, strict=True)]
    ids = torch.tensor(rows)
    inputs = {"input_ids": ids, "attention_mask": (ids != 0).long()}
    positions = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    with clearhead.record(writer) as recording, torch.no_grad():
        writer(**inputs, position_ids=positions)
    views = clearhead.look(recording, wordpieces, inputs)
    assert views.labels == ["item 0", "item 1"]
    for view, text in zip(views, texts, strict=True):
        alone = clearhead.look(writer, wordpieces, text)
        assert [piece.strip().lower() for piece in view.tokens] == [piece.strip().lower() for piece in alone.tokens]
        for attn, expected in zip(view.maps, alone.maps, strict=True):
            assert attn.mask == causal()
            torch.testing.assert_close(attn.to_dense(), expected.to_dense(), atol=1e-5, rtol=1e-4)


def test_an_item_keeps_bias_scale_and_a_mask_that_is_no_rule() -> None:
    torch.manual_seed(3)
    q, k, v = torch.randn(3, 2, 2, 6, 4).unbind()
    seen, bias = torch.rand(2, 1, 6, 6) > 0.3, torch.randn(2, 2, 6, 6)
    seen |= torch.eye(6, dtype=torch.bool)
    whole = SoftmaxMap(q, k, v=v, mask=seen, bias=bias, scale=0.7, softcap=5.0)
    part = of_item(whole, 1, slice(1, 6), slice(1, 6))
    expected = SoftmaxMap(
        q[1:, :, 1:], k[1:, :, 1:], mask=seen[1:, :, 1:, 1:], bias=bias[1:, :, 1:, 1:], scale=0.7, softcap=5.0
    )
    torch.testing.assert_close(part.to_dense(), expected.to_dense())
    assert of_item(whole, 0, slice(0, 6), slice(0, 6)).mask is not None


def test_an_item_of_a_padded_generation() -> None:
    """The prompt is padded at its start; each later token sees all that is real."""
    q = torch.randn(1, 1, 6, 4)
    real = torch.tensor([[0, 1, 1, 1]])
    prompt = SoftmaxMap(q[:, :, :4], q[:, :, :4], mask=causal() & clearhead.masks.padding(keys=real, queries=real))
    steps = SoftmaxMap(q[:, :, 4:], q, mask=causal() & clearhead.masks.padding(keys=torch.tensor([[0, 1, 1, 1, 1, 1]])))
    part = of_item(Stitched([prompt, steps]), 0, slice(1, 6), slice(1, 6))
    torch.testing.assert_close(part.to_dense(), SoftmaxMap(q[:, :, 1:], q[:, :, 1:], mask=causal()).to_dense())


def test_tokens_of_a_recording_are_numbers_until_they_are_told(writer: Any) -> None:
    ids = torch.tensor([[101, 7, 8, 7], [101, 9, 9, 10]])
    with clearhead.record(writer) as recording, torch.no_grad():
        writer(input_ids=ids)
    assert clearhead.look(recording)[0].tokens == ["0", " 1", " 2", " 3"]
    assert clearhead.look(recording, tokens=["a", "b", "c", "d"])[1].tokens == ["a", " b", " c", " d"]
    each = clearhead.look(recording, tokens=[["a", "b", "c", "d"], ["e", "f", "f", "g"]])
    assert each[1].texts[0].ids.tolist() == [0, 1, 1, 2]
    with pytest.raises(ShapeError, match="2 tokens for item 0, whose maps have 4"):
        clearhead.look(recording, tokens=["a", "b"])


# --- several views ------------------------------------------------------------------------------------------------


def test_texts_in_a_list_are_views_of_one_page(writer: Any, wordpieces: Any, tmp_path: Path) -> None:
    views = clearhead.look(writer, wordpieces, [SOURCE, TARGET])
    assert isinstance(views, Views)
    assert views.labels == [view.title for view in views]
    assert views.labels[1] == "GPT2LMHeadModel: [CLS]The lamp was lit.[SEP]"
    assert views.save(tmp_path / "two.html").stat().st_size == views.page().nbytes
    one = clearhead.look(writer, wordpieces, SOURCE)
    torch.testing.assert_close(views[0].maps[1].to_dense(), one.maps[1].to_dense())


def test_views_of_views_are_views(writer: Any, wordpieces: Any) -> None:
    views = clearhead.look(writer, wordpieces, [SOURCE, TARGET])
    steps = clearhead.look([views, views[0]], labels=[0, 100, 200])
    assert (len(steps), steps.labels, len(steps[1:])) == (3, [0, 100, 200], 2)
    with pytest.raises(ShapeError, match="3 views, but 1 labels"):
        clearhead.look([views, views[0]], labels=["a"])
    with clearhead.record(writer) as recording, torch.no_grad():
        writer(input_ids=views[1].texts[0].ids[None])
    both = clearhead.look([views[1], recording], labels=["looked at", "recorded"], tokens=views[1].tokens)
    torch.testing.assert_close(both[1].maps[1].to_dense(), both[0].maps[1].to_dense())
    assert [piece.strip() for piece in both[1].tokens] == [piece.strip() for piece in views[1].tokens]
    with pytest.raises(ModelError, match="expected views, as look"):
        clearhead.look([writer])
    with pytest.raises(ShapeError, match="at least one view"):
        clearhead.look([])


def test_the_budget_is_for_all_views_together(writer: Any, wordpieces: Any) -> None:
    views = clearhead.look(writer, wordpieces, [SOURCE, TARGET])
    page = views.page(budget=300_000)
    assert page.nbytes <= 300_000
    assert len(page.exact) <= 8
