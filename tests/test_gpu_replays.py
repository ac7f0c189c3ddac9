"""Replays are compared to the bit: on a CPU, with torch's kernel and a recorded graph."""

from __future__ import annotations

import pytest
import torch

from attn_backends.cache import CacheFormat
from attn_backends.compressed_cache import CompressedFormat
from attn_backends.graphs import RecordedGraph
from tests import gluon_replays as replays

all_cases = replays.CASES


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(replays, "CASES", (("fa3", "torch", CacheFormat.KV, 4), ("fa3", "gluon", CacheFormat.KV, 300)))
    monkeypatch.setattr(replays, "NUM_REPLAYS", 3)
    monkeypatch.setattr(replays, "SIZES", (2, 310))
    monkeypatch.setattr("benchmarks.shapes.COLD_BYTES", 0)
    monkeypatch.setattr("benchmarks.compressed.COLD_BYTES", 1)


def test_replays_that_give_the_same_bits_pass_and_what_is_not_here_is_a_row():
    ran, absent = replays.rows("cpu")
    assert ran == {"backend": "fa3", "kernel": "torch", "width": 4, "replays": 3, "other": 0, "status": "pass"}
    assert absent["status"] == "not_run"
    assert "runs on CUDA devices, not on cpu" in absent["reason"]


def test_rows_of_compressed_layers_are_replayed_too(monkeypatch):
    monkeypatch.setattr(replays, "CASES", (("dsv4", "torch", CompressedFormat.COMPRESSED, 2),))
    (ran,) = replays.rows("cpu")
    assert (ran["backend"], ran["replays"], ran["other"], ran["status"]) == ("dsv4", 3, 0, "pass")
    assert ("dsv4", "gluon", CompressedFormat.COMPRESSED, 8) in all_cases


def test_a_replay_with_one_other_bit_fails(monkeypatch):
    replay, turns = RecordedGraph.replay, []

    def disturbed(self):
        replay(self)
        turns.append(self)
        if len(turns) == 2:
            self.output.view(torch.int16).flatten()[0] ^= 1

    monkeypatch.setattr(RecordedGraph, "replay", disturbed)
    monkeypatch.setattr(RecordedGraph, "capture", keeping(RecordedGraph.capture))
    ran, _ = replays.rows("cpu")
    assert (ran["other"], ran["status"]) == (1, "fail")


def keeping(capture):
    """A capture that keeps what the region gave."""

    def kept(self, region, *given):
        self.output = capture(self, region, *given)
        return self.output

    return kept
