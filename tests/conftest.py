"""What all tests share: no network, one thread a worker, and the real models, loaded once."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
if "PYTEST_XDIST_WORKER" in os.environ:  # two workers with two threads each would fight over two cores
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("NUMBA_NUM_THREADS", "1")

import pytest
from hypothesis import settings

settings.register_profile("here", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("here")

Loaded = tuple[Any, Any]  # (model, tokenizer)


def _load(name: str) -> Loaded:
    pytest.importorskip("transformers")
    from clearhead import zoo

    entry = next(entry for entry in zoo.available() if entry.name == name)
    if entry.status == "missing":
        pytest.skip(f"{name} is not installed: {entry.how}")
    return zoo.load(name)


def _fixture(name: str) -> Callable[[], Loaded]:
    def loaded() -> Loaded:
        return _load(name)

    loaded.__doc__ = f"(model, tokenizer) of {name}, loaded once; skips where it is not installed."
    return pytest.fixture(scope="session", name=name)(loaded)


smollm2 = _fixture("smollm2")
minilm = _fixture("minilm")
rxnmapper = _fixture("rxnmapper")
mpnet = _fixture("mpnet")  # 405 MB, and not in models.txt: where somebody has installed it


@pytest.fixture(scope="session")
def wordpieces(minilm: Loaded) -> Any:
    """The tokenizer of MiniLM, without the token types that only BERT reads."""
    own = copy.deepcopy(minilm[1])
    own.model_input_names = ["input_ids", "attention_mask"]
    return own


@pytest.fixture(scope="session")
def translator(wordpieces: Any) -> Any:
    """An encoder-decoder model of one layer a side, random weights."""
    import torch
    from transformers import MarianConfig, MarianMTModel

    torch.manual_seed(0)
    of_side = {"layers": 1, "attention_heads": 2, "ffn_dim": 16}
    sizes = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in of_side.items()}
    special = {"pad_token_id": 0, "decoder_start_token_id": 101, "eos_token_id": 102, "forced_eos_token_id": None}
    config = MarianConfig(d_model=32, vocab_size=len(wordpieces), init_std=0.4, **sizes, **special)
    return MarianMTModel(config).eval()


@pytest.fixture(scope="session")
def writer(wordpieces: Any) -> Any:
    """A language model of two layers, random weights."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": len(wordpieces), "initializer_range": 0.5}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=101, eos_token_id=102, pad_token_id=0)).eval()


@pytest.fixture(scope="session")
def painter() -> Any:
    """A model of one layer that reads an image of 32 × 32 in patches of 8 × 8, random weights."""
    import torch

    transformers = pytest.importorskip("transformers")
    torch.manual_seed(2)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.ViTConfig(**sizes, image_size=32, patch_size=8, initializer_range=0.3)
    return transformers.ViTModel(config).eval()


LETTERS = ["<unk>", "<s>", "</s>", *"abcdefghijklmnopqrstuvwxyz", "Ġ", "Ġt", "he", "Ġthe"]


def _write_gguf(path: Path, seed: int = 0) -> Path:
    """A llama of two layers with random weights and a tokenizer of 33 tokens, 60 kB."""
    gguf = pytest.importorskip("gguf")
    import numpy as np

    draw = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(2)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(LETTERS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(LETTERS)
    writer.add_token_types([3, 3, 3] + [1] * (len(LETTERS) - 3))
    writer.add_token_merges(["Ġ t", "h e", "Ġt he"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    shapes = {"token_embd": (len(LETTERS), 32), "output_norm": (32,)}
    for block in (f"blk.{i}." for i in range(2)):
        shapes |= {block + "attn_norm": (32,), block + "ffn_norm": (32,)}
        shapes |= {block + "attn_q": (32, 32), block + "attn_k": (16, 32), block + "attn_v": (16, 32)}
        shapes |= {block + "attn_output": (32, 32), block + "ffn_gate": (48, 32), block + "ffn_up": (48, 32)}
        shapes |= {block + "ffn_down": (32, 48)}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", draw.standard_normal(shape, dtype=np.float32) / 6)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def write_gguf() -> Callable[..., Path]:
    """``write_gguf(path, seed)``: a whole, tiny, random language model in one file."""
    return _write_gguf


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A tiny language model as a .gguf file, alone in a folder of its own."""
    (tmp_path / "model").mkdir()
    return _write_gguf(tmp_path / "model" / "tiny.gguf")


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder for this test alone; nothing is in it, it does not even exist."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("CLEARHEAD_CACHE", str(folder))
    return folder / "models"
