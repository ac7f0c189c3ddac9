"""What each of our kernels is compiled for over batches of many sizes: `python -m tests.launch_keys` prints a line of
JSON, by name how often Triton would compile. Nothing is compiled, and no GPU is needed; a process of its own, because
in that of the tests Triton interprets.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

SIZES = tuple(product((1, 2, 3, 16, 100), (1, 4), (80, 4096)))  # requests, query rows of each, keys at most
LENS, FORMS = (300, 16, 65), ("csr", "page table", "block table")
_DTYPE = torch.bfloat16


def lists(form: str, bs: int, most: int, odd: int) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor]:
    """Query rows, pages and lengths of a batch, at odd addresses where `odd` is 1."""
    starts = torch.empty(bs + 2, dtype=torch.int32)[odd:][: bs + 1]
    table = torch.empty(bs, most + odd, dtype=torch.int32)[:, odd:]
    lens = torch.empty(bs + 1, dtype=torch.int32)[odd:][:bs]
    given = {"csr": (starts, starts, table[0]), "page table": (starts, None, table), "block table": (None, None, table)}
    return (*given[form], lens)


def attend(form: str, latent: bool, sinks: Tensor | None, room: int) -> None:
    """Decodes, verifies and prompts of a form, for one layer. room: elements of the scratch."""
    from attn_backends.kernels import triton_decode, triton_prefill

    dim, v_dim, num_heads, num_kv_heads = (576, 512, 16, 1) if latent else (128, 128, 32, 8)
    pages = torch.empty(4, 64, num_kv_heads, dim, dtype=_DTYPE)
    k, v = pages, pages[..., :v_dim] if latent else torch.empty_like(pages)
    extras = (128 if sinks is not None else None, None, sinks)
    prompts = ((bs, width, 4096) for bs in (1, 2, 3, 16) for width in LENS)
    for i, (bs, width, most) in enumerate((*SIZES, *prompts)):
        q = torch.empty(bs * width, num_heads, dim, dtype=_DTYPE)
        given = (q, k, v, *lists(form, bs, max(1, most // 64), i % 2), width)
        if width > 64:
            triton_prefill.paged_attention(*given, True, 0.1, 1.0, 1.0, *extras)
        else:
            scratch = torch.empty(room), torch.empty(room // v_dim)
            triton_decode.paged_attention(*given, most, True, 0.1, 1.0, 1.0, *scratch, *extras)


def store() -> None:
    """Rows, and keys with values, of batches of many sizes."""
    from attn_backends.kernels import triton_ring, triton_store

    pages, latents = torch.empty(4, 64, 8, 128, dtype=_DTYPE), torch.empty(4, 64, 576, dtype=_DTYPE)
    for i, n in enumerate((1, 2, 3, 16, 300)):
        slots = torch.empty(2 * n + 1, dtype=torch.int64)[i % 2 :][: n * (1 + i // 3) : 1 + i // 3]
        rows = torch.empty(n, 8, 128, dtype=_DTYPE)
        triton_store.store_kv(pages, pages, rows, rows, slots, 1.0, 1.0)
        triton_store.store_rows(latents, torch.empty(n, 576, dtype=_DTYPE), slots, 1.0)
        hidden, rings = torch.empty(n, 64, dtype=_DTYPE), torch.empty(4, 8, 64, dtype=_DTYPE)
        triton_ring.store_ring(rings, torch.empty(4, 8, dtype=torch.int64), hidden, *[slots] * 5)


def trees() -> None:
    """Verifies of trees of one shape."""
    from attn_backends.kernels import triton_tree

    pages = torch.empty(4, 64, 1, 576, dtype=_DTYPE)
    for i, bs in enumerate((1, 2, 3, 16, 100)):
        q, out = (torch.empty(bs * 8, 16, dim, dtype=_DTYPE) for dim in (576, 512))
        mask, slots = torch.empty(bs, 8, 8, dtype=torch.bool), torch.empty(bs * 8 + 1, dtype=torch.int64)[i % 2 :]
        given = (slots[: bs * 8].view(bs, 8), mask, out, torch.empty(bs * 8, 16), 0.1, 1.0, 1.0)
        triton_tree.tree_join(q, pages, pages[..., :512], *given)


def compressed() -> None:
    """A compressed layer's entries and rows, written, chosen and read."""
    from attn_backends.kernels import triton_compressor, triton_indexer, triton_sparse
    from attn_backends.kernels.torch_compressed import Keys

    pools = [torch.empty(4, 64 * 584, dtype=torch.uint8) for _ in range(2)]
    states, index = torch.empty(4, 8, 2048), torch.empty(4, 64, 128, dtype=_DTYPE)
    for i, (n, wide) in enumerate(product((1, 2, 3, 16, 64, 128, 300), (1, 16, 65))):
        ints = [torch.empty(n * 512 + 2, dtype=torch.int32)[i % 2 :] for _ in range(2)]
        q, rows = torch.empty(n, 64, 512, dtype=_DTYPE), torch.empty(n, 512, dtype=_DTYPE)
        slots, lens = ints[0][: n * 512].view(n, 512), ints[1][:n]
        triton_sparse.sparse_attention(q, [Keys(pool, 64, slots, lens) for pool in pools], 0.1, torch.empty(64))
        triton_compressor.write_rows(pools[0], 64, lens, rows)
        values = torch.empty(n, 1024)
        triton_compressor.write_states(states, lens, values, values)
        reads, norm = ints[0][: n * 8].view(n, 8), torch.empty(512)
        given = (values, values, states, reads, reads, lens, torch.empty(4, 1024), norm, 1e-6, norm[:32], True)
        triton_compressor.write_entries(pools[1], 64, lens, *given)
        index_q, weights = torch.empty(n, 64, 128, dtype=_DTYPE), torch.empty(n, 64)
        table, starts = torch.empty(n, 64 + wide, dtype=torch.int32), ints[0][: n + 1]
        triton_indexer.select_entries(index_q, weights, index, table, starts, lens, lens, 1 + i % 3, 512)


def _all() -> Iterator[tuple[str, Any]]:
    for form, latent in product(FORMS, (False, True)):
        for room in (2**26, 0):
            name = f"{'latents' if latent else 'keys'}, {form}, {'parts' if room else 'whole'}"
            yield name, lambda f=form, latent=latent, r=room: attend(f, latent, None, r)
    yield "windows", lambda: attend("block table", False, torch.empty(32), 0)
    yield from (("store", store), ("trees", trees), ("compressed", compressed))


def main() -> None:
    """Launch all, and print what was asked of the compiler."""
    import triton
    from triton.backends.compiler import GPUTarget

    target = GPUTarget("cuda", 90, 32)
    here = {"get_current_target": lambda: target, "get_current_device": lambda: 0}
    triton.runtime.driver.set_active(SimpleNamespace(**here, get_current_stream=lambda device: 0))
    found: dict[str, set[str]] = defaultdict(set)

    def hook(*, key: str, fn: Any, **given: Any) -> bool:
        found[fn.name.rpartition(".")[2]].add(str(key))
        return True  # and nothing is compiled

    triton.knobs.runtime.jit_cache_hook = hook
    for name, launch in _all():
        found.clear()
        launch()
        print(json.dumps([name, {kernel: sorted(keys) for kernel, keys in found.items()}]))


if __name__ == "__main__":
    main()
