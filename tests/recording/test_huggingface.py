"""Seam 1: transformers models, beside what `test_support.py` shows of every architecture."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clearhead.recording as recording
from clearhead.errors import RecordingError

from .architectures import ARCHITECTURES, build
from .measuring import compare, handed_out

transformers = pytest.importorskip("transformers")

BOTH = ["eager", "sdpa"]


def padded(B: int, T: int, side: str | None) -> dict[str, Tensor]:
    """Tokens, and a mask that pads the first sequence by three on one side."""
    mask = torch.ones(B, T, dtype=torch.long)
    if side is not None:
        mask[0, slice(0, 3) if side == "left" else slice(T - 3, T)] = 0
    return {
        "input_ids": torch.randint(3, 60, (B, T), generator=torch.Generator().manual_seed(2)),
        "attention_mask": mask,
    }


def run(model: nn.Module, inputs: dict[str, Tensor], implementation: str, **more: Any) -> Any:
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        return model(**inputs, **more)


def worst(model: Any, inputs: dict[str, Tensor], implementations: list[str]) -> float:
    """The largest error of any weight under these implementations, whose outputs must not change at all."""
    before, errors = model.config._attn_implementation, []
    try:
        model.set_attn_implementation("eager")
        with torch.no_grad():
            expected = handed_out(model, inputs)
            for implementation in implementations:
                model.set_attn_implementation(implementation)
                measured = compare(model, inputs, expected)
                assert measured.difference == 0
                errors.append(measured.error)
        return max(errors)
    finally:
        model.set_attn_implementation(before)  # the model may be everybody's


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_trap19_every_precision_is_understood_and_read_in_float32_or_wider(dtype, precision):
    model, inputs = build("Gemma 2").to(dtype), padded(2, 10, "left")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        with recording.record(model) as rec:
            run(model, inputs, "eager")
    finally:
        torch.set_float32_matmul_precision(before)
    assert rec[0].to_dense().dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert (rec[0].to_dense()[1].sum(-1) - 1).abs().max() <= 1e-5


@pytest.mark.parametrize("side", ["left", pytest.param(None, marks=pytest.mark.full)])  # compiles: 10 s each
@pytest.mark.filterwarnings("ignore")
def test_flex_attention_is_read_from_its_block_mask(side):
    assert worst(build("Mistral"), padded(2, 10, side), ["flex_attention"]) <= 2e-6


def test_trap05_a_float_mask_of_zeros_and_ones_pads_too():
    model, inputs = build("BERT"), padded(2, 10, "right")
    with recording.record(model) as rec:
        run(model, inputs, "sdpa")
        run(model, {**inputs, "attention_mask": inputs["attention_mask"].float()}, "sdpa")
    whole, as_float = (each[0].to_dense() for each in rec.passes)
    assert (as_float[0, :, 7:] == 0).all()
    assert torch.equal(as_float, whole)


def test_trap04_left_padding_makes_empty_rows_that_are_zero():
    with recording.record(model := build("Llama")) as rec:
        run(model, padded(2, 10, "left"), "sdpa")
    dense = rec[0].to_dense()
    assert (dense[0, :, :3] == 0).all()
    assert (dense[0, :, :, :3] == 0).all()
    assert (rec[0].entropy()[0, :, :3] == 0).all()
    assert (rec[0].lse[0, :, :3] == -torch.inf).all()


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")  # renamed in transformers 5.24
def test_trap15_grouped_heads_arrive_unexpanded_even_for_one_query():
    model, inputs = build("Llama"), padded(2, 10, "left")
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        cache = model(**{n: x[:, :9] for n, x in inputs.items()}).past_key_values
        with recording.record(model) as rec:
            model(
                input_ids=inputs["input_ids"][:, 9:],
                attention_mask=inputs["attention_mask"],
                past_key_values=cache,
            )
    dense = run(model, inputs, "eager", output_attentions=True).attentions
    assert rec[0].shape == (2, 4, 1, 10)
    assert rec[0].k.shape[1] == 2
    for ours, theirs in zip(rec, dense, strict=True):
        assert (ours.to_dense() - theirs[:, :, -1:]).abs().max() <= 2e-6


def test_trap16_windows_alternate_and_count_the_query():
    with recording.record(model := build("Gemma 2")) as rec:
        run(model, padded(1, 10, None), "eager")
    counts = [(attn.to_dense()[0, 0] > 0).sum(-1).tolist() for attn in rec]
    assert counts[0] == [1, 2, 3, 4, 4, 4, 4, 4, 4, 4]
    assert counts[1] == list(range(1, 11))


def test_trap17_learned_sinks_take_weight_and_the_map_says_so():
    with recording.record(model := build("GPT-OSS")) as rec:
        run(model, padded(1, 10, None), "eager")
    assert (rec[0].to_dense().sum(-1) < 1).all()
    assert "sum to less than 1" in repr(rec[0])


def test_one_module_called_many_times_is_many_layers():
    with recording.record(model := build("ALBERT")) as rec:
        run(model, padded(1, 10, None), "sdpa")
    assert rec.layers == [0, 1, 2]
    path = rec.paths[0]
    assert rec.paths == [path] * 3
    assert rec[path, 2] is rec[2]
    with pytest.raises(RecordingError, match=r"called 3 times in this pass, as layers 0, 1, 2"):
        rec[path]


@pytest.mark.parametrize("name", ["BART", "T5", "Whisper"])
@pytest.mark.parametrize("implementation", BOTH)
def test_trap18_padded_targets_attend_to_no_source_either_if_it_is_whole(name, implementation):
    model, given = build(name, implementation), ARCHITECTURES[name].inputs(False)
    given["decoder_attention_mask"][0, :3] = given["decoder_attention_mask"][1, 7:] = 0
    with torch.no_grad(), recording.record(model) as rec:
        model(**given)
    real = given["decoder_attention_mask"][:, None].float()
    for attn in rec.cross:
        assert (attn.to_dense().sum(-1) - real).abs().max() <= 1e-6


def test_trap17_t5_has_its_position_bias_and_no_scale():
    with recording.record(model := build("T5")) as rec:
        model(**ARCHITECTURES["T5"].inputs(False))
    assert rec.encoder[0].bias is not None
    assert rec.encoder[0].scale == 1.0


def test_training_with_the_graph_kept_reaches_the_weights():
    model, inputs = build("Llama"), padded(2, 10, None)
    model.set_attn_implementation("sdpa")
    with recording.record(model, detach=False) as rec:
        model(**inputs)
    rec[0].entropy().sum().backward()
    assert model.model.layers[0].self_attn.q_proj.weight.grad.abs().sum() > 0


def test_dropout_in_training_is_not_in_the_weights():
    model = build("Llama").train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    with recording.record(model) as rec:
        model(**padded(2, 10, None))
    assert model.training
    assert (rec[0].to_dense().sum(-1) - 1).abs().max() <= 1e-6


@pytest.fixture
def registered():
    """Registers an attention implementation for the test, and takes it back."""
    names = []

    def register(function: Callable[..., Any]) -> str:
        name = f"clearhead_test_{len(names)}"
        transformers.AttentionInterface.register(name, function)
        names.append(name)
        return name

    yield register
    for name in names:
        del transformers.AttentionInterface._global_mapping[name]


def test_an_implementation_of_the_users_own_is_checked_against_its_output(registered):
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def wrapper(*args, **kwargs):
        return sdpa_attention_forward(*args, **kwargs)

    model, inputs = build("Llama"), padded(2, 10, None)
    dense = run(model, inputs, "eager", output_attentions=True).attentions
    with recording.record(model) as rec:
        run(model, inputs, registered(wrapper))  # no mask function is registered: causal by is_causal alone
    assert max((a.to_dense() - b).abs().max() for a, b in zip(rec, dense, strict=True)) <= 2e-6


def test_an_implementation_that_computes_something_else_is_an_error(registered):
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def sharper(module, query, key, value, attention_mask, scaling=None, **kwargs):
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=3 * scaling, **kwargs)

    model, inputs = build("Llama"), padded(2, 10, None)
    with pytest.raises(RecordingError, match="its output is not softmax"), recording.record(model):
        run(model, inputs, registered(sharper))


@pytest.mark.parametrize("implementation", BOTH)
def test_a_call_under_somebody_elses_function_mode_is_seen_once(implementation):
    class OnDevice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = build("Llama")

        def forward(self, **inputs: Tensor) -> Any:
            with torch.device("cpu"):  # a function mode above ours
                return self.model(**inputs)

    model = OnDevice()
    model.model.set_attn_implementation(implementation)
    with recording.record(model) as rec:
        model(**padded(2, 10, None))
    assert rec.paths == [f"model.model.layers.{n}.self_attn" for n in range(3)]


def test_a_function_that_calls_one_it_was_given_earlier_is_seen_once(registered):
    model, given = build("Llama"), []
    interface = sys.modules["transformers.modeling_utils"].ALL_ATTENTION_FUNCTIONS

    def keeps(*args, **kwargs):
        return given[0](*args, **kwargs)

    with recording.record(model) as rec:
        model.register_forward_pre_hook(lambda *_: given.append(interface.get_interface("sdpa", None)))
        run(model, padded(2, 10, None), registered(keeps))
    assert given[0].reports_to_clearhead
    assert rec.layers == [0, 1, 2]


def test_a_subclass_of_the_interface_that_overrides_the_method_is_seen_once(monkeypatch):
    from transformers.models.llama import modeling_llama

    class Interface(transformers.AttentionInterface):
        def get_interface(self, attn_implementation, default):
            return super().get_interface(attn_implementation, default)

    monkeypatch.setattr(modeling_llama, "ALL_ATTENTION_FUNCTIONS", Interface())
    own = Interface.get_interface
    with recording.record(model := build("Llama")) as rec:
        run(model, padded(1, 10, None), "sdpa")
    assert rec.layers == [0, 1, 2]
    assert Interface.get_interface is own


def test_transformers_is_not_loaded_by_recording():
    import subprocess

    code = "import sys, clearhead.recording; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})


# --- real weights ---------------------------------------------------------------------------------

TEXT = (
    "When Mary and John went to the store, John gave a drink to Mary. The store was old, and the drink was"
    " cold; Mary thanked John, and John thanked the man in the store. When Mary and John went home, Mary gave"
    " the drink to a child who had been waiting by the door since morning, and the child gave it to the dog. "
)


@pytest.mark.parametrize("tokens", [90, pytest.param(512, marks=pytest.mark.full)])
def test_trap01_smollm2_every_layer_and_head(smollm2, tokens):
    model, tokenizer = smollm2
    ids = tokenizer(TEXT * 8, return_tensors="pt").input_ids[:, :tokens]
    assert worst(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, BOTH) <= 1e-5


def test_trap05_smollm2_in_a_left_padded_batch(smollm2):
    model, tokenizer = smollm2
    ids = tokenizer(TEXT, return_tensors="pt").input_ids[:, :48].repeat(2, 1)
    mask = torch.ones_like(ids)
    mask[0, :17] = 0
    assert worst(model, {"input_ids": ids, "attention_mask": mask}, BOTH) <= 1e-5


def test_trap05_minilm_in_a_padded_batch(minilm):
    model, tokenizer = minilm
    inputs = dict(tokenizer(["The dog chased the cat", TEXT], padding=True, return_tensors="pt"))
    assert int(inputs["attention_mask"][0].sum()) == 7
    assert worst(model, inputs, BOTH) <= 1e-5


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
def test_flex_attention_on_smollm2(smollm2):
    model, tokenizer = smollm2
    ids = tokenizer(TEXT, return_tensors="pt").input_ids[:, :90]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    assert worst(model, inputs, ["flex_attention"]) <= 1e-5
