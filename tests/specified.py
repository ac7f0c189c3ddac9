"""Which elements of shared buffers a planner must write, and so which ones two planners agree on."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from spec_metadata import Buffers, Step, dense_part
from spec_metadata.plans.compressed import GROUP, Compression
from spec_metadata.visibility import leading, num_visible_pages

TABLES = ("page_table", "block_table", "kv_indices")


def specified(step: Step, buffers: Buffers, compressions: Iterable[Compression] = ()) -> dict[str, Tensor]:
    """The elements [shape of the buffer] bool that must be written, of buffers that have others too. compressions: of a
    compressed plan.
    """
    (table,) = (name for name in TABLES if name in buffers)
    forward, num_columns = step.num_forwards - 1, buffers[table].shape[-1]
    pages = num_visible_pages(step, dense_part(step, None if table == "kv_indices" else forward))
    if table == "kv_indices":
        masks = {table: leading(pages, buffers.extent.max_pages).flatten()}
    else:
        masks = {table: leading(pages, num_columns)}
    for ratio in (each.ratio for each in compressions if not each.indexed):
        num_entries = buffers[f"num_entries_{ratio}"] + GROUP.of(buffers.extent)
        masks[f"entry_slots_{ratio}"] = leading(num_entries, buffers[f"entry_slots_{ratio}"].shape[-1])
    return masks
