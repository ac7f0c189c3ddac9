"""Buffers that several formats declare: starts of query rows, lengths, and page ids."""

from __future__ import annotations

import torch

from spec_metadata.buffers import BS, MAX_KV_LEN, NOTHING, NUM_PAGES, NUM_TOKENS, BufferSpec, Dim


def query_starts_spec(name: str) -> BufferSpec:
    """The buffer of `spec_metadata.query_starts`."""
    return BufferSpec(name, torch.int32, (BS + 1,), "first query row of each request", high=NUM_TOKENS + 1)


def kv_lens_spec(name: str, *shape: Dim) -> BufferSpec:
    """The buffer of `DensePart.kv_lens`."""
    doc = "keys that the last row of a request sees; of a tree, the committed ones"
    return BufferSpec(name, torch.int32, shape, doc, high=MAX_KV_LEN + 1)


def pages_spec(name: str, *shape: Dim, over_read: Dim = NOTHING) -> BufferSpec:
    """The buffer that `visibility.write_pages` writes, which all phases of the same requests share."""
    doc = "page ids; past the visible keys those of any pages"
    return BufferSpec(name, torch.int32, shape, doc, high=NUM_PAGES, over_read=over_read, shared=True)
