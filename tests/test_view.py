"""`look`, on real models and on a layer of the reader's own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import clearhead
from clearhead import DenseMap, ModelError, RecordingError, ShapeError, SoftmaxMap, View, masks
from clearhead._files import write_whole
from clearhead.testing.memory import Allocations
from clearhead.view import _is_causal, is_plain

TEXT = "Mara Quill climbed the stair and lit the lamp. In the morning Mara Quill opened the log."
JOURNEY = ["Your", "journey", "starts", "with", "one", "step"]
X = torch.tensor([[0.43, 0.15], [0.55, 0.87], [0.57, 0.85], [0.22, 0.58], [0.77, 0.25], [0.05, 0.80]])


class Mine(nn.Module):
    """A student's layer: D = 2, every number can be checked by hand."""

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)


@pytest.fixture(scope="module")
def view(smollm2: tuple[Any, Any]) -> View:
    return clearhead.look(*smollm2, TEXT, name="SmolLM2")


def test_a_view_holds_every_layer(view: View) -> None:
    n = len(view.tokens)
    assert [attn.shape for attn in view.maps] == [(1, 9, n, n)] * 30
    assert view.layers == list(range(30))
    assert "".join(view.tokens) == TEXT
    assert view.dense_nbytes == 270 * n * n * 4
    assert repr(view) == f"View(SmolLM2: {n} tokens, 30 layers, 270 heads)"


def test_heads_are_scored_once(view: View) -> None:
    heads = view.heads()
    assert len(heads) == 270
    assert heads.strongest("induction")[0].label == "L17H5"
    assert list(view.heads()) == list(heads)


def test_the_saved_page_has_the_predicted_size(view: View, tmp_path: Path) -> None:
    page = view.page()
    path = view.save(tmp_path / "page.html")
    assert path.stat().st_size == page.nbytes <= 2_000_000
    assert list(tmp_path.iterdir()) == [path]
    assert path.stat().st_mode & 0o444


def test_a_notebook_shows_the_page_in_a_frame(view: View) -> None:
    frame, _, _ = view._repr_html_().partition("</iframe>")
    assert frame.startswith("<iframe")
    assert "<script" not in frame  # escaped: the notebook's own page is out of reach


def test_the_whole_map_is_looked_through_once_in_one_pass(smollm2: tuple[Any, Any]) -> None:
    stages: list[tuple[str, int, int]] = []
    view = clearhead.look(*smollm2, TEXT, layers=[3, 17], on_progress=lambda *at: stages.append(at))
    view.heads()
    view.page()
    assert view.layers == [3, 17]
    assert stages == [("model", 0, 1), ("model", 1, 1)] + [("heads", n, 2) for n in range(3)]
    assert {head.layer for head in view.heads()} == {3, 17}


def test_an_encoder_is_looked_at_both_ways(minilm: tuple[Any, Any], tmp_path: Path) -> None:
    view = clearhead.look(*minilm, "The dog chased the cat")
    assert view.tokens[0] == "[CLS]"
    assert len(view.heads()) == 72
    assert view.maps[0][0, 0, 0].count_nonzero() == 7
    assert view.save(tmp_path / "encoder.html").stat().st_size > 100_000


def test_one_token(smollm2: tuple[Any, Any], tmp_path: Path) -> None:
    view = clearhead.look(*smollm2, "Hi")
    assert len(view.tokens) == 1
    assert {head.role for head in view.heads()} == {"other"}
    assert view.save(tmp_path / "one.html").exists()


def test_a_layer_of_ones_own_on_the_tiny_example(tmp_path: Path) -> None:
    view = clearhead.look(Mine(), X, tokens=JOURNEY)
    assert [token.strip() for token in view.tokens] == JOURNEY
    scores = X[1] @ X[:2].T / 2**0.5
    torch.testing.assert_close(view.maps[0][0, 0, 1, :], torch.cat([scores.softmax(0), torch.zeros(4)]))
    assert view.name == "Mine"
    assert len(view.heads()) == 1
    assert view.save(tmp_path / "mine.html").exists()


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (masks.causal(), True),
        (masks.sliding_window(5), True),
        (masks.causal() & masks.documents(torch.arange(300) // 7), True),
        (masks.prefix(1), True),
        (masks.prefix(2), False),
        (masks.documents((torch.arange(300) + 1) // 2), False),  # one token ahead, and from odd rows only
        (None, False),
    ],
)
def test_a_map_is_causal_where_no_row_looks_ahead(rule: Any, expected: bool) -> None:
    q = torch.randn(1, 1, 300, 4)
    assert _is_causal(SoftmaxMap(q, q, mask=rule)) is expected


class ByHand(nn.Module):
    """A student's layer with the formula written out, and the weights spoilt if wanted."""

    def __init__(self, power: float = 1.0) -> None:
        super().__init__()
        self.power = power

    def forward(self, x: Tensor) -> Tensor:
        later = torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool).triu(1)
        scores = (x @ x.mT / x.shape[-1] ** 0.5).masked_fill(later, -torch.inf)
        return torch.softmax(scores if self.power == 1 else scores.exp(), dim=-1) @ x


def test_a_layer_with_the_softmax_written_out_is_derived_on_the_page(tmp_path: Path) -> None:
    for x in (X, X[None]):
        view = clearhead.look(ByHand(), x, tokens=JOURNEY)
        torch.testing.assert_close(view.maps[0].to_dense(), clearhead.look(Mine(), x).maps[0].to_dense())
        assert repr(view.maps[0].mask) == "causal()"
        assert is_plain(view.maps[0])


def test_weights_of_ones_own_making_are_shown_with_a_batch() -> None:
    view = clearhead.look(ByHand(power=2), X[None], tokens=JOURNEY)
    assert isinstance(view.maps[0], DenseMap)
    assert len(view.heads()) == 1
    assert view.page().nbytes > 0
    with pytest.raises(RecordingError, match=r"in two dimensions: as softmax\(q @ k\.T\) @ v"):
        clearhead.look(ByHand(power=2), X)


def test_numbers_stand_for_missing_tokens() -> None:
    assert [token.strip() for token in clearhead.look(Mine(), X[None]).tokens] == list("012345")


def test_layer_input_errors() -> None:
    with pytest.raises(ShapeError, match=r"x has 6 rows, but there are 2 tokens"):
        clearhead.look(Mine(), X, tokens=["a", "b"])
    with pytest.raises(ShapeError, match=r"one sequence, x \(T, d\) or \(1, T, d\), got a float32 tensor of shape \(2"):
        clearhead.look(Mine(), torch.zeros(2, 6, 2))
    with pytest.raises(ShapeError, match="one sequence"):
        clearhead.look(Mine(), torch.zeros(0, 2))


def test_trap_26_a_model_without_attention() -> None:
    with pytest.raises(RecordingError, match="no attention"):
        clearhead.look(nn.Linear(2, 2), X)


def test_a_text_longer_than_the_context(minilm: tuple[Any, Any]) -> None:
    with pytest.raises(ModelError, match=r"the text has 1,002 tokens, and bert reads at most 512\. Shorten"):
        clearhead.look(*minilm, "cat " * 1000, name="bert")


def test_an_encoder_decoder_model_and_its_encoder(rxnmapper: tuple[Any, Any]) -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    tokenizer = rxnmapper[1]
    config = T5Config(vocab_size=len(tokenizer), d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    model = T5ForConditionalGeneration(config).eval()
    with pytest.raises(ModelError, match=r"does not say with which token its decoder starts"):
        clearhead.look(model, tokenizer, "CCO", target="CC")
    model.config.decoder_start_token_id = 0
    assert repr(clearhead.look(model, tokenizer, "CCO", target="CC")).startswith(
        "View(T5ForConditionalGeneration: 5 + 4"
    )
    assert clearhead.look(model.get_encoder(), tokenizer, "CCO").maps[0].shape == (1, 2, 5, 5)


def test_a_missing_text(smollm2: tuple[Any, Any]) -> None:
    with pytest.raises(ModelError, match="the text is missing"):
        clearhead.look(*smollm2)  # type: ignore[call-overload]


def test_trap_02_looking_changes_nothing(smollm2: tuple[Any, Any]) -> None:
    model, tokenizer = smollm2
    inputs = tokenizer(TEXT, return_tensors="pt")
    with torch.no_grad():
        before = model(**inputs).logits
        state = torch.get_rng_state()
        clearhead.look(model, tokenizer, TEXT).heads()
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.equal(model(**inputs).logits, before)
    assert not model.training


def test_writing_is_all_or_nothing(tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    target.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        write_whole(target, "half \ud800")
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_what_cannot_be_written_is_named_as_it_was_asked_for(tmp_path: Path) -> None:
    target = tmp_path / "not there" / "page.html"
    with pytest.raises(FileNotFoundError) as raised:
        write_whole(target, "text")
    assert raised.value.filename == str(target)


def test_a_page_has_the_rights_of_any_new_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking for the umask means setting it: other threads' files would be open to all for a moment."""
    before = os.umask(0o027)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(os, "umask", lambda mask: pytest.fail("the umask of the process was set"))
            write_whole(tmp_path / ("a" * 250 + ".html"), "text\n")
    finally:
        os.umask(before)
    (written,) = tmp_path.iterdir()
    assert (written.stat().st_mode & 0o777, written.read_bytes()) == (0o640, b"text\n")


CHILD = """
import resource, torch, clearhead
torch.set_num_threads(1)
class Long(torch.nn.Module):
    def forward(self, x):
        return torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
x = torch.randn(6000, 16)
clearhead.look(Long(), x[:600]).page()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
clearhead.look(Long(), x).page()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


@pytest.mark.full
def test_trap_10_looking_at_6000_tokens_makes_no_dense_matrix() -> None:
    """A dense map is 144 MB; the tiles, the strong weights and the page take less than it."""
    done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, timeout=250, check=True)
    assert int(done.stdout) < 130e6


def test_a_short_repeated_sentence_shows_induction(smollm2: tuple[Any, Any]) -> None:
    heads = clearhead.look(*smollm2, "The cat sat on the mat. The cat sat on the").heads()
    assert "L17H5" in [head.label for head in heads.strongest("induction")]
    assert heads.counts()["local"] < 30


def test_wrong_arguments_are_named(smollm2: tuple[Any, Any]) -> None:
    model, tokenizer = smollm2
    with pytest.raises(ModelError, match="expected a PyTorch module first, got str"):
        clearhead.look("smollm2", tokenizer, TEXT)  # type: ignore[call-overload]
    with pytest.raises(ModelError, match=r"look\(model, ndarray of shape \(6, 2\)\): the text is missing"):
        clearhead.look(Mine(), X.numpy())  # type: ignore[call-overload]
    with pytest.raises(ModelError, match="leave tokens out"):
        clearhead.look(model, tokenizer, TEXT, tokens=["a"])  # type: ignore[call-overload]
    with pytest.raises(ModelError, match="half a character"):
        clearhead.look(model, tokenizer, "a\ud800")


def test_the_tokenizer_of_another_model(smollm2: tuple[Any, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=100)
    with pytest.raises(ModelError, match="beyond the 100 that GPT2LMHeadModel knows: is this its own tokenizer"):
        clearhead.look(transformers.GPT2LMHeadModel(config).eval(), smollm2[1], TEXT)
    with torch.device("meta"):
        empty = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8))
    with pytest.raises(ModelError, match="meta device"):
        clearhead.look(empty, smollm2[1], TEXT)


def test_trap_23_attention_that_is_not_finite_is_not_shown_as_healthy() -> None:
    for x in (X * 1e25, torch.where(X > 0.8, torch.nan, X)):
        with pytest.raises(ModelError, match=r"the attention of L0H0 and 0 more heads of its layer is not finite"):
            clearhead.look(Mine(), x).heads()


def test_links_are_followed_and_pipes_are_written_into(tmp_path: Path) -> None:
    target, link, pipe = tmp_path / "page.html", tmp_path / "link.html", tmp_path / "pipe"
    target.write_text("old")
    link.symlink_to(target)
    write_whole(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    os.mkfifo(pipe)
    with subprocess.Popen(
        [sys.executable, "-c", f"print(open({str(pipe)!r}).read())"], stdout=subprocess.PIPE
    ) as child:
        write_whole(pipe, "through")
        assert child.communicate(timeout=30)[0] == b"through\n"
    assert pipe.is_fifo()


class Heads(nn.Module):
    """A student's layer that hands out its own map, with the heads wherever it likes."""

    def __init__(self, shape: tuple[int, ...], *, dense: bool = False) -> None:
        super().__init__()
        self.shape, self.dense = shape, dense

    def attend(self, x: Tensor) -> tuple[Tensor, clearhead.AttentionMap]:
        q = x.mT.reshape(*self.shape, 6, 1)
        attn = SoftmaxMap(q, q, mask=masks.causal())
        return x, clearhead.DenseMap(attn.to_dense()) if self.dense else attn


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("shape", [(2,), (1, 2)])
def test_a_layer_may_hand_out_its_own_map(shape: tuple[int, ...], dense: bool) -> None:
    view = clearhead.look(Heads(shape, dense=dense), X, tokens=JOURNEY)
    q = X.mT[..., None].double()
    expected = clearhead.reference.weights(q, q, mask=clearhead.reference.causal(6, 6))
    assert view.maps[0].shape == (1, 2, 6, 6)
    torch.testing.assert_close(view.maps[0].to_dense()[0].double(), expected, atol=1e-6, rtol=0)
    assert [head.label for head in view.heads()] == ["L0H0", "L0H1"]


def test_one_head_of_a_layer_of_ones_own_is_derived_exactly() -> None:
    class One(nn.Module):
        def attend(self, x: Tensor) -> tuple[Tensor, SoftmaxMap]:
            return x, SoftmaxMap(x, x, v=x, scale=1.0)

    view = clearhead.look(One(), X, tokens=JOURNEY)
    assert view.maps[0].shape == (1, 1, 6, 6)
    assert isinstance(view.maps[0], SoftmaxMap)
    assert view.maps[0].scale == 1.0


@pytest.mark.parametrize("result", [X, (X, X), (X, SoftmaxMap(X[:5], X[:5])), (X, SoftmaxMap(X[:, None], X[:, None]))])
def test_a_layer_that_hands_out_something_else_is_told_what_is_expected(result: Any) -> None:
    class Other(nn.Module):
        def attend(self, x: Tensor) -> Any:
            return result

    with pytest.raises(ModelError, match="attend"):
        clearhead.look(Other(), X)


@pytest.mark.parametrize(
    "layer",
    [
        clearhead.nn.SimpleSelfAttention(),
        clearhead.nn.CausalAttention(2, 2, 6, 0.0),
        clearhead.nn.MultiHeadAttentionWrapper(2, 2, 6, 0.0, 2),
        clearhead.nn.MultiHeadAttention(2, 4, 6, 0.0, 2),
        clearhead.nn.Attention(2, 4, num_heads=2, num_kv_heads=1, window=3),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_every_rung_can_be_looked_at(layer: nn.Module) -> None:
    torch.manual_seed(0)
    view = clearhead.look(layer, X, tokens=JOURNEY)
    expected = layer.attend(X)[1].to_dense().reshape(1, -1, 6, 6)
    torch.testing.assert_close(view.maps[0].to_dense(), expected, atol=0, rtol=0)
    assert len(view.heads()) == expected.shape[1]
    assert view.page().nbytes > 0


def test_a_long_map_handed_out_is_never_made_dense() -> None:
    layer, x = clearhead.nn.LinearAttention(4, 4, 2), torch.randn(2048, 4)
    with Allocations() as allocations:
        view = clearhead.look(layer, x)
    assert view.maps[0].shape == (1, 2, 2048, 2048)
    assert allocations.largest < 2 * 2048 * 2048 * 4


def test_a_part_of_a_map_with_rules_can_be_handed_out() -> None:
    class Second(nn.Module):
        def attend(self, x: Tensor) -> tuple[Tensor, clearhead.AttentionMap]:
            real = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1]])
            both = SoftmaxMap(torch.stack([x, x])[:, None], torch.stack([x, x])[:, None], mask=masks.padding(real))
            return x, both[1]

    expected = Second().attend(X)[1].to_dense()
    assert torch.equal(clearhead.look(Second(), X).maps[0].to_dense(), expected[None])
