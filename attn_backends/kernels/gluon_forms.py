"""The choices that our Gluon kernels leave open on Hopper, and the table of those that a sweep found faster.

`python -m tests.gluon_sweep` times each form beside the default one of its head size. An entry of `SWEPT` is at least
5 % faster than that on a shape of its key, and at most 1 % slower on any. Those below are of an H100
(docs/results/h100/gluon_forms.json), which has as many multiprocessors as an H200. Nothing is measured at run time.

The rule for shapes outside the table: a key that it lacks takes the default form of its head size, whether its pages,
heads or multiprocessors were swept or not. `DEFAULTS` have as many keys as fit in shared memory twice, and so many
registers that no group spills. Prompts of all widths have one key, so that no later prompt compiles a kernel anew.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import lru_cache
from typing import NamedTuple

LATENT = 576  # elements of a key of `gluon_mla`
WIDTHS = (1, 16)  # query rows of a decode, and of a verify at most; more are a prompt


class Form(NamedTuple):
    """keys: of a block. registers: of a thread of the two groups that attend; of 504 for a thread of each group the
    third has the rest. ahead: page ids of a block are read while the one before is copied. turn: tiles of a
    multiprocessor before those of the next columns begin. Of latents `registers` is the only choice.
    """

    keys: int
    registers: int
    ahead: bool = True
    turn: int = 2


class Key(NamedTuple):
    """Sizes that forms are swept by. dim: elements of a key. itemsize: bytes of each. heads: query heads of latents; 0
    of others, as tiles have 128 rows of any number of heads. width: 0 of a decode, 1 of a verify, 2 of a prompt, and of
    all rows that attend no latents. processors: multiprocessors.
    """

    dim: int
    itemsize: int
    page_size: int
    heads: int
    width: int
    processors: int


DEFAULTS = {
    64: Form(128, 200),
    128: Form(128, 208),
    192: Form(128, 216, ahead=False),
    256: Form(64, 224, ahead=False),
    LATENT: Form(128, 216),
}
SWEPT = {
    Key(64, 2, 16, 0, 2, 132): Form(128, 200, turn=4),
    Key(192, 2, 1, 0, 2, 132): Form(128, 216),
    Key(192, 2, 16, 0, 2, 132): Form(128, 216),
    Key(256, 2, 1, 0, 2, 132): Form(64, 224),
    Key(256, 2, 16, 0, 2, 132): Form(64, 224),
}


def key_of(dim: int, itemsize: int, page_size: int, heads: int, width: int, processors: int) -> Key:
    """The key of a launch. heads: of queries. width: query rows of a request, at most. The others: as of `Key`."""
    of_latents = (heads, bisect_left(WIDTHS, width))
    return Key(dim, itemsize, page_size, *(of_latents if dim == LATENT else (0, len(WIDTHS))), processors)


@lru_cache(1024)
def form_of(dim: int, itemsize: int, page_size: int, heads: int, width: int, processors: int) -> Form:
    """The form of a launch, of the same arguments as `key_of`."""
    return SWEPT.get(key_of(dim, itemsize, page_size, heads, width, processors), DEFAULTS[dim])
