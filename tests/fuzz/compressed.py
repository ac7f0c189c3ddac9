"""What dsv4's metadata says, against the model: windows, visible entries, and what makes the entries of a forward.

An entry stands for `ratio` tokens of a page and is made by the row that closes the block, from `read_window` tokens: of
this forward's rows, or of earlier forwards' states, which a ring of rows in each page keeps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tests.fuzz.decode import Malformed, require
from tests.fuzz.model import Group, Ints, Truth, prefix_sums

_GROUP = 64  # entries that FlashMLA reads at a time, so that padding must stand behind the last one


class Ring(NamedTuple):
    """A compression. ring: state rows of a page. has_slots: whether its entries are listed, not selected."""

    ratio: int
    read_window: int
    ring: int
    has_slots: bool


def check_forward(
    truth: Truth, group: Group, forward: int, plan: Mapping[str, Any], window: int, rings: Sequence[Ring]
) -> None:
    """Refuse metadata of a forward that does not say what the model does."""
    real, request = group.is_real, group.of_rows(group.requests)
    position = np.where(real, group.position(forward), 0)
    live = np.arange(group.bs) < group.num_real[:, None]
    require(~real | (plan["request"] == group.owner), "a row of another request")
    require(~live | (plan["qo_indptr"][:, : group.bs] == group.starts[:, :-1]), "qo_indptr")
    _check_window(truth, plan, window, real, request, position)
    ends = group.lens + (group.num_forwards if group.kind == "draft" else group.widths)
    pages = truth.owned[:, :: truth.page_size] // truth.page_size
    columns = min(plan["page_table"].shape[2], pages.shape[1])
    seen = np.arange(columns) < np.where(live, -(-ends // truth.page_size), 0)[..., None]
    same = plan["page_table"][:, : group.bs, :columns] == pages[group.requests][..., :columns]
    require(~seen | same, "page_table has another page")
    for ring in rings:
        _check_visible(truth, plan, ring, real, request, position)
        _check_made(truth, group, forward, plan, ring)
        _check_states(truth, group, plan, ring, real, request, position)


def _check_window(truth: Truth, plan: Mapping[str, Any], window: int, real: Any, request: Ints, position: Ints) -> None:
    lens, slots = plan["window_lens"], plan["window_slots"]
    inside = np.arange(slots.shape[2]) < lens[..., None]
    sums = np.where(inside, truth.sums(slots), np.uint64(0)).sum(2, dtype=np.uint64)
    first = (position + 1 - window).clip(0)
    wanted = truth.prefixes[request, position + 1] - truth.prefixes[request, first]
    require(~real | (lens == position + 1 - first), "a window of another length")
    require(~real | (sums == wanted), "a window of other slots")
    require(real | ((lens > 0) & (sums == 0)), "a padded row's window is not of the reserved page")
    require(inside | (slots == -1), "something behind a window")


def _check_visible(truth: Truth, plan: Mapping[str, Any], ring: Ring, real: Any, request: Ints, position: Ints) -> None:
    found = plan[f"num_visible_{ring.ratio}"]
    require(~real | (found == (position + 1) // ring.ratio), f"a row sees another number of entries of {ring.ratio}")
    if not ring.has_slots:
        return
    slots = plan[f"slots_{ring.ratio}"]
    column = np.arange(slots.shape[2]) - found[..., None]
    sums = np.where(column < 0, truth.sums(np.where(slots < 0, -1, slots * ring.ratio)), np.uint64(0))
    starts = truth.owned[:, :: ring.ratio] // ring.ratio * ring.ratio
    wanted = prefix_sums(truth.numbers[starts])[request, (position + 1) // ring.ratio]
    require(~real | (sums.sum(2, dtype=np.uint64) == wanted), f"a row sees other entries of {ring.ratio}")
    require((column < 0) | (column >= _GROUP) | (slots == -1), f"something behind the entries of {ring.ratio}")
    require(real | (sums == 0).all(2), "a padded row sees somebody's entries")


def _check_made(truth: Truth, group: Group, forward: int, plan: Mapping[str, Any], ring: Ring) -> None:
    """The entries of real requests that close in a forward, and what each is made of, in any order."""
    ratio, names = ring.ratio, ("write_slots", "first_positions", "input_rows", "state_reads")
    found = [plan[f"{name}_{ratio}"] for name in names]
    rows_of_page = truth.page_size // ratio
    is_made = (found[0] >= 0) & (found[0] // rows_of_page != truth.reserved_page)
    start = (group.lens + (forward if group.kind == "draft" else 0))[..., None]
    width = (np.minimum(group.widths, 1) if group.kind == "draft" else group.widths)[..., None]
    entry = start // ratio + np.arange(int(width.max(initial=0)) // ratio + 1)
    is_due = (entry < (start + width) // ratio) & (width > 0)
    require(is_made.sum(1) == is_due.sum((1, 2)), f"another number of entries of {ratio} is made")
    step, place, _ = np.nonzero(is_due)
    first, start, request = entry[is_due] * ratio, start[step, place, 0], group.requests[step, place]
    token = first[:, None] + np.arange(ratio - ring.read_window, ratio)
    inputs = token + (group.starts[step, place] - start)[:, None]
    slots = truth.owned[request[:, None], token.clip(0)]
    states = slots // truth.page_size * ring.ring + token % ring.ring
    wanted = [
        truth.owned[request, first] // ratio,
        first,
        np.where(token >= start[:, None], inputs, -1),
        np.where((token >= 0) & (token < start[:, None]), states, -1),
    ]
    step_found = np.nonzero(is_made)[0]
    order, order_found = np.lexsort((wanted[0], step)), np.lexsort((found[0][is_made], step_found))
    for name, want, have in zip(names, wanted, found, strict=True):
        differ = want[order] != have[is_made][order_found]
        if differ.any():
            raise Malformed(f"{name} of entries of {ratio}", int(step[order][np.argwhere(differ)[0, 0]]))


def _check_states(
    truth: Truth, group: Group, plan: Mapping[str, Any], ring: Ring, real: Any, request: Ints, position: Ints
) -> None:
    """Each row keeps its state, but for one whose place a later row of the forward takes."""
    found = plan[f"state_writes_{ring.ratio}"]
    last = position if group.kind == "draft" else position - group.depth + group.of_rows(group.widths) - 1
    later = position + ring.ring
    is_replaced = (later <= last) & (later // truth.page_size == position // truth.page_size)
    states = truth.owned[request, position] // truth.page_size * ring.ring + position % ring.ring
    require(~real | (found == np.where(is_replaced, -1, states)), f"state rows of {ring.ratio}")
    require(real | (found == -1) | (found // ring.ring == truth.reserved_page), "a padded row writes somebody's states")
