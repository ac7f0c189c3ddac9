"""A step attended by the backend's kernel, against attention in float64 over the model's sets of slots."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.fuzz.decode import Malformed
from tests.fuzz.driver import Attention
from tests.fuzz.model import Group, Ints, Truth, expected, visible_slots

TOLERANCE = {"torch.float64": 1e-9, "torch.bfloat16": 3e-2}


def attend(layer: Attention, rng: np.random.Generator, truth: Truth, group: Group, step: int, ats: list[Any]) -> None:
    """Run all forwards of one step and refuse outputs, log-sum-exps or a cache that are not the definition's.

    ats: the metadata of each forward.
    """
    heads, kv_heads, dim, v_dim = layer.sizes
    pools, first = layer.contents(), layer.first_slot
    for forward, at in enumerate(ats):
        q, q_host = layer.random(rng, group.num_tokens, heads, dim)
        new = [layer.random(rng, group.num_tokens, kv_heads, size) for size in (dim, v_dim)[: len(pools)]]
        out, lse = layer.run(at, q, [tensor for tensor, _ in new])
        num_real = int(group.is_real[step].sum())
        writes = expected(truth, group, forward).writes[step, :num_real]
        for pool, (_, rows) in zip(pools, new, strict=True):
            pool[first + writes] = rows[:num_real]
        for row, slots in enumerate(visible_slots(truth, group, forward, step)):
            keys, values = (pools[0][first + slots], pools[-1][first + slots][..., :v_dim])
            if layer.name == "rows":
                keys = values = _keys_of_dsv4(layer, truth, group, forward, step, row, keys)
            wanted = _attention(q_host[row], keys, values, layer.scale)
            for name, have, want in zip(("output", "log-sum-exp"), (out[row], lse[row]), wanted, strict=True):
                error = np.abs(have - want).max()
                most, kernel = np.abs(want).max(), layer.engine.backend.kernel_of(at.kind).name
                if not error <= TOLERANCE[str(layer.dtype)] * max(1, most):
                    again = np.abs(layer.attend(at, q)[name == "log-sum-exp"][row] - want).max()
                    said = f"the {name} of {kernel} is off by {error:.1e} (up to {most:.1e}, over {len(slots)} slots)"
                    said += f", and launched again by {again:.1e}"
                    raise Malformed(f"forward {forward}, row {row}: {said}", step)
        _check_pools(layer, truth, pools, step)


def _attention(q: Any, keys: Any, values: Any, scale: float) -> tuple[Any, Any]:
    """Attention of one row. q: [heads, dim]. keys, values: [num_keys, kv_heads, dim]."""
    keys, values = (np.repeat(each, q.shape[0] // each.shape[1], 1) for each in (keys, values))
    scores = np.einsum("hd,khd->hk", q, keys) * scale
    peak = scores.max(1, keepdims=True)
    weights = np.exp(scores - peak)
    total = weights.sum(1, keepdims=True)
    return np.einsum("hk,khd->hd", weights / total, values), (peak + np.log(total))[:, 0]


def _keys_of_dsv4(layer: Attention, truth: Truth, group: Group, forward: int, step: int, row: int, rows: Any) -> Any:
    """A row's window, and the entries of all blocks that are closed by then."""
    window = rows[-layer.engine.backend.window :]
    if layer.ring is None:
        return window
    request, position = group.of_rows(group.requests)[step, row], group.position(forward)[step, row]
    entries: Ints = truth.owned[request, : (position + 1) // layer.ring.ratio * layer.ring.ratio : layer.ring.ratio]
    return np.concatenate((window, layer.entries()[entries // layer.ring.ratio][:, None]))


def _check_pools(layer: Attention, truth: Truth, pools: list[Any], step: int) -> None:
    """Nothing but the rows was written, but for the reserved page, whose contents the expected pools then take over."""
    reserved = layer.first_slot + truth.reserved_page * truth.page_size + np.arange(truth.page_size)
    for pool, found in zip(pools, layer.contents(), strict=True):
        pool[reserved] = found[reserved]
        if not np.array_equal(pool, found):
            slots = np.unique(np.argwhere(pool != found)[:, 0]) - layer.first_slot
            raise Malformed(f"the cache differs in slots {slots[:8].tolist()}", step)
