"""What a recording is: a sequence of lazy maps, also by module path."""

from __future__ import annotations

import pytest
import torch

from clearhead.errors import RecordingError
from clearhead.recording import Recording, record


@pytest.fixture
def recording(nano, ids) -> Recording:
    with record(nano) as recorded:
        nano(ids)
    return recorded


def test_a_recording_is_a_sequence(recording):
    assert len(recording) == 3
    assert recording[-1] is recording[2]
    assert recording[1:] == [recording[1], recording[2]]
    assert list(recording) == [recording[n] for n in range(3)]
    assert recording.layers == [0, 1, 2]
    assert recording["h.1.attn"] is recording[1]
    assert recording["h.1.attn", 0] is recording[1]
    assert recording.passes[0][1] is recording[1]


def test_attentions_are_lazy_and_in_order(recording):
    assert recording.attentions == tuple(recording)


def test_to_attentions_is_the_dense_tuple(recording):
    dense = recording.to_attentions()
    assert isinstance(dense, tuple)
    assert [tuple(x.shape) for x in dense] == [(2, 4, 11, 11)] * 3
    assert torch.equal(dense[1], recording[1].to_dense())
    assert sum(x.numel() * x.element_size() for x in dense) == recording.dense_nbytes


def test_trap10_to_attentions_refuses_above_the_stated_size_and_names_the_bytes(recording):
    with pytest.raises(RecordingError, match=r"to_attentions\(max_bytes=1,000\): the dense weights take 11,616 bytes"):
        recording.to_attentions(max_bytes=1000)


def test_repr_and_sizes_do_not_even_make_the_maps(nano, ids, monkeypatch):
    with record(nano) as recording:
        nano(ids)
    monkeypatch.setattr("clearhead.recording.calls.Call.to_map", lambda *_: 1 / 0)
    assert repr(recording) == "Recording(layers=3, each (2, 4, 11, 11); holds 25.3 kB, dense 11.6 kB)"
    assert repr(recording.passes[0]).startswith("Pass(layers=3")
    assert (recording.nbytes, recording.dense_nbytes) == (25344, 11616)


def test_bytes_count_each_storage_once(recording):
    fused = recording[0].q.untyped_storage().nbytes()  # q, k and v are one product, split
    assert recording.nbytes == 3 * fused


def test_several_passes_have_to_be_named(nano, ids):
    with record(nano) as recording:
        nano(ids)
        nano(ids[:, :5])
    assert [each[0].shape[-1] for each in recording.passes] == [11, 5]
    for ask in (
        lambda: recording[0],
        lambda: len(recording),
        lambda: recording.paths,
        lambda: list(recording),
    ):
        with pytest.raises(RecordingError, match=r"called 2 times.*recording\.passes\[0\] … recording\.passes\[1\]"):
            ask()
    assert repr(recording).startswith("Recording(passes=2; holds")
    assert recording.dense_nbytes == sum(each.dense_nbytes for each in recording.passes)


def test_asking_before_the_model_has_run_says_so(nano, ids):
    with record(nano) as recording:
        with pytest.raises(RecordingError, match=r"recording\[0\]: nothing is recorded"):
            recording[0]
        nano(ids)
        assert len(recording) == 3  # complete as soon as the model has returned


def test_an_unknown_path_names_near_ones(recording):
    with pytest.raises(RecordingError, match=r"recording\['h\.1\.atn'\].*Near: 'h\.1\.attn'"):
        recording["h.1.atn"]


def test_an_index_out_of_range_names_the_layers(nano, ids):
    with record(nano, layers=[1, 2]) as recording:
        nano(ids)
    with pytest.raises(IndexError, match=r"recording\[17\]: there are 2 maps here, of layers 1, 2"):
        recording[17]
