"""Models that TransformerLens and nnsight wrap record like the models inside. Optional: where those are installed."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from clearhead import DenseMap, SoftmaxMap
from clearhead.recording import record

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")  # these libraries have their own to give

LLAMA = {
    "vocab_size": 60,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
}
IDS = torch.randint(4, 50, (2, 11), generator=torch.Generator().manual_seed(1))
LEFT = (torch.arange(11) >= torch.tensor([[4], [0]])).long()


def drawn(model: Any) -> Any:
    """With weights large enough that attention is not uniform."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.25)
    return model.eval()


@pytest.fixture
def llama() -> Any:
    config = transformers.LlamaConfig(**LLAMA, architectures=["LlamaForCausalLM"])
    return drawn(transformers.LlamaForCausalLM._from_config(config, attn_implementation="eager"))


def agree(recording: Any, theirs: list[Tensor], real: Tensor | None = None) -> None:
    """Each map is their weights, those of padded queries left out."""
    assert len(recording) == len(theirs)
    for attn, weights in zip(recording, theirs, strict=True):
        expected = weights if real is None else weights * real.bool()[:, None, :, None]
        assert (attn.to_dense() - expected).abs().max() <= 1e-6


# --- TransformerLens: its own model ---------------------------------------------------------------


@pytest.fixture
def hooked() -> Callable[..., Any]:
    """Makes a HookedTransformer of two layers."""
    lens = pytest.importorskip("transformer_lens")
    try:
        make = lens.HookedTransformer
    except (AttributeError, ImportError):
        pytest.skip("HookedTransformer is gone from this version of TransformerLens (4.0 and later)")

    def build(**more: Any) -> Any:
        config = {
            "n_layers": 2,
            "d_model": 32,
            "n_ctx": 64,
            "d_head": 8,
            "n_heads": 4,
            "d_vocab": 50,
            "act_fn": "gelu",
            "positional_embedding_type": "rotary",
            "rotary_dim": 8,
            "device": "cpu",
        }
        return drawn(make(lens.HookedTransformerConfig(**{**config, **more})))

    return build


KINDS: dict[str, dict[str, Any]] = {
    "rotary": {},
    "learned positions": {"positional_embedding_type": "standard", "rotary_dim": None},
    "alibi": {"positional_embedding_type": "alibi", "rotary_dim": None},
    "shared keys": {"n_key_value_heads": 2},
    "windows": {"use_local_attn": True, "window_size": 4, "attn_types": ["local", "global"]},
    "soft cap": {"attn_scores_soft_cap": 3.0},
    "bidirectional": {"attention_dir": "bidirectional"},
}


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_a_hooked_transformer_gives_the_patterns_of_its_own_cache(hooked, kind):
    model = hooked(**KINDS[kind])
    plain, cache = model.run_with_cache(IDS)
    with record(model) as recording:
        out = model(IDS)
    assert torch.equal(out, plain)
    assert all(isinstance(attn, SoftmaxMap) for attn in recording)
    assert recording.paths == ["blocks.0.attn", "blocks.1.attn"]
    agree(recording, [cache["pattern", n] for n in range(2)])


@torch.no_grad()
def test_trap05_a_hooked_transformer_with_left_padding(hooked):
    model = hooked()
    plain, cache = model.run_with_cache(IDS, attention_mask=LEFT)
    with record(model) as recording:
        out = model(IDS, attention_mask=LEFT)
    assert torch.equal(out, plain)
    agree(recording, [cache["pattern", n] for n in range(2)], LEFT)


@torch.no_grad()
def test_a_hook_that_takes_a_head_out_is_recorded_with_its_effect(hooked):
    model = hooked()

    def without_head_1(pattern: Tensor, hook: Any) -> Tensor:
        pattern = pattern.clone()
        pattern[:, 1] = 0
        return pattern

    hooks = [("blocks.0.attn.hook_pattern", without_head_1)]
    plain = model.run_with_hooks(IDS, fwd_hooks=hooks)
    with record(model) as recording:
        out = model.run_with_hooks(IDS, fwd_hooks=hooks)
    assert torch.equal(out, plain)
    assert isinstance(recording[0], DenseMap)
    assert isinstance(recording[1], SoftmaxMap)
    with model.hooks(fwd_hooks=hooks):
        cache = model.run_with_cache(IDS)[1]
    first = cache["pattern", 0].clone()  # the cache may hold it as it was before the hook
    first[:, 1] = 0
    agree(recording, [first, cache["pattern", 1]])


@torch.no_grad()
def test_trap20_a_hooked_transformer_generates_one_text(hooked):
    model = hooked()
    with record(model) as steps:
        text = model.generate(IDS[:1], max_new_tokens=4, do_sample=False, stop_at_eos=False, verbose=False)
    assert len(steps.passes) == 4
    cache = model.run_with_cache(text[:, :-1])[1]
    agree(steps, [cache["pattern", n] for n in range(2)])


# --- TransformerLens: its bridge to transformers' models ------------------------------------------


@pytest.fixture
def bridge(llama: Any, tmp_path: Path) -> Any:
    """A TransformerBridge around the llama; it wants a tokenizer that lies in a folder."""
    pytest.importorskip("transformer_lens")
    from tokenizers import Tokenizer, models

    build = pytest.importorskip("transformer_lens.model_bridge").TransformerBridge.boot_transformers
    words = Tokenizer(models.WordLevel({str(n): n for n in range(60)}, unk_token="0"))
    special = {"unk_token": "0", "pad_token": "1", "bos_token": "2", "eos_token": "3"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(tmp_path)
    llama.save_pretrained(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    return build(str(tmp_path), hf_model=llama, tokenizer=tokenizer, device="cpu")


@torch.no_grad()
@pytest.mark.parametrize("compatible", [False, True])
@pytest.mark.parametrize("way", ["called", "run_with_cache", "run_with_hooks"])
def test_a_bridge_gives_the_patterns_of_its_own_cache(bridge, compatible, way):
    if compatible:
        bridge.enable_compatibility_mode(disable_warnings=True)
    call = {"called": bridge, "run_with_cache": lambda ids: bridge.run_with_cache(ids)[0]}.get(
        way, lambda ids: bridge.run_with_hooks(ids, fwd_hooks=[("blocks.0.attn.hook_pattern", lambda p, hook: p)])
    )
    plain, cache = bridge.run_with_cache(IDS)
    with record(bridge) as recording:
        out = call(IDS)
    assert torch.equal(out, plain)
    assert [path.split(".")[:2] for path in recording.paths] == [["blocks", "0"], ["blocks", "1"]]
    agree(recording, [cache["pattern", n] for n in range(2)])


@torch.no_grad()
def test_the_model_inside_a_bridge_may_be_recorded_instead(bridge, llama):
    cache = bridge.run_with_cache(IDS)[1]
    with record(llama) as recording:
        bridge(IDS)
    agree(recording, [cache["pattern", n] for n in range(2)])


# --- nnsight --------------------------------------------------------------------------------------


@pytest.fixture
def traced(llama: Any) -> Any:
    """The llama in nnsight's wrapper."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nnsight = pytest.importorskip("nnsight")
    return nnsight.NNsight(llama)


@torch.no_grad()
@pytest.mark.parametrize("what", ["the wrapper", "the model inside"])
def test_a_trace_of_nnsights_records_like_the_model(traced, llama, what):
    theirs = llama(IDS, attention_mask=LEFT, output_attentions=True)
    with record(traced if what == "the wrapper" else llama) as recording:  # noqa: SIM117 (a trace needs its own line)
        with traced.trace(IDS, attention_mask=LEFT):
            logits = traced.lm_head.output.save()
    assert torch.equal(logits, theirs.logits)
    assert recording.paths == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    agree(recording, list(theirs.attentions), LEFT)


@torch.no_grad()
def test_an_intervention_of_nnsights_shows_in_the_layers_after_it(traced, llama):
    theirs = llama(IDS, output_attentions=True).attentions
    with record(traced) as recording:  # noqa: SIM117
        with traced.trace(IDS):
            traced.model.layers[0].output[:] = 0
            traced.lm_head.output.save()
    agree(recording[:1], list(theirs[:1]))
    assert (recording[1].to_dense()[:, :, 0, 0] == 1).all()
    assert (recording[1].to_dense() - torch.ones(11, 11).tril() / torch.arange(1, 12)[:, None]).abs().max() <= 1e-6


@torch.no_grad()
def test_a_part_of_an_nnsight_model_is_recorded_by_itself(traced, llama):
    with record(traced.model) as recording:
        llama(IDS)
    assert recording.paths == ["layers.0.self_attn", "layers.1.self_attn"]
