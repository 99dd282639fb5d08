"""DenseMap takes what libraries give, and says what they failed to give."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from clearhead import DenseMap, DTypeError, ShapeError, average_heads


@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4), (2, 2, 3, 4)])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_trap_24_arrays_of_rank_2_to_4(shape: tuple[int, ...], dtype: type) -> None:
    array = np.random.default_rng(0).random(shape).astype(dtype)
    attn = DenseMap(array)
    assert attn.shape == shape
    assert attn.dtype == (torch.float64 if dtype == np.float64 else torch.float32)
    np.testing.assert_array_equal(
        attn.to_dense().numpy(), array.astype(np.float64 if dtype == np.float64 else np.float32)
    )


def test_nothing_is_copied() -> None:
    array = np.zeros((3, 3), dtype=np.float32)
    attn = DenseMap(array)
    array[0, 0] = 1
    assert attn[0, 0] == 1


def test_arrays_that_cannot_be_written_to() -> None:
    assert DenseMap(np.broadcast_to(np.eye(3), (2, 3, 3))).shape == (2, 3, 3)


@pytest.mark.parametrize("kind", [tuple, list])
def test_trap_24_the_tuple_that_output_attentions_gives(kind: type) -> None:
    layers = kind(torch.rand(2, 3, 4, 4) for _ in range(5))
    attn = DenseMap(layers)
    assert attn.shape == (5, 2, 3, 4, 4)
    assert torch.equal(attn[4].to_dense(), layers[4])
    assert torch.equal(attn[-1, 1, 2].to_dense(), layers[4][1, 2])
    torch.testing.assert_close(average_heads(attn).to_dense(), torch.stack(list(layers)).mean(2))


@pytest.mark.parametrize("empty", [(), []])
def test_trap_01_the_empty_tuple_of_a_fused_model(empty: object) -> None:
    with pytest.raises(
        ShapeError, match=r"output_attentions=True.*clearhead.record\(model\).*attn_implementation='eager'"
    ):
        DenseMap(empty)


@pytest.mark.parametrize("none", [None, (None, None)])
def test_trap_01_none_for_weights(none: object) -> None:
    with pytest.raises(DTypeError, match=r"None for a layer's weights.*clearhead.record"):
        DenseMap(none)


@pytest.mark.parametrize("shape", [(3,), (1, 1, 1, 3, 3)])
def test_trap_24_other_ranks_name_the_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match=r"of shape " + str(shape).replace("(", r"\(").replace(")", r"\)")):
        DenseMap(torch.zeros(shape))


def test_other_dtypes_and_uneven_layers() -> None:
    with pytest.raises(DTypeError, match="expected floating-point weights"):
        DenseMap(torch.zeros(3, 3, dtype=torch.long))
    with pytest.raises(ShapeError, match=r"one shape, got \(1, 1, 2, 2\), \(1, 1, 3, 3\)"):
        DenseMap((torch.zeros(1, 1, 2, 2), torch.zeros(1, 1, 3, 3)))
