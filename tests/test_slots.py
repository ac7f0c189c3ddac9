"""The slot allocator: pages are given, shared, counted and taken back."""

from __future__ import annotations

import random
import tracemalloc

import pytest
import torch

from attn_backends_reference.eagle.slots import OutOfSlotsError, SlotAllocator
from spec_metadata import CacheGeometry, Capacity

PROMPT = list(range(100, 130))


def allocator(num_pages=20, page_size=4, max_bs=4, num_rerun=0):
    capacity = Capacity(max_bs, 60, page_size, num_draft_tokens=2, num_rerun=num_rerun)
    return SlotAllocator(CacheGeometry(num_pages, page_size), capacity, torch.device("cpu"), seed=1)


def committed(slots, prompt, num_committed=None):
    """A row whose prompt is committed."""
    row = slots.admit(slots.prefix_keys(prompt))
    slots.reserve(row, len(prompt))
    slots.share(row, slots.prefix_keys(prompt), len(prompt) if num_committed is None else num_committed)
    return row


def table(slots, row, num_tokens):
    return slots.table[row, :num_tokens].tolist()


def expected_table(slots, row, num_tokens):
    size = slots.geometry.page_size
    return [page * size + i for page in slots.pages(row) for i in range(size)][:num_tokens]


def test_a_row_that_shares_reads_the_pages_of_the_other():
    slots = allocator()
    first = committed(slots, PROMPT)
    second = slots.admit(slots.prefix_keys(PROMPT))
    assert slots.num_held_tokens(second) == slots.num_shared_tokens(slots.prefix_keys(PROMPT)) == 28
    assert table(slots, second, 28) == table(slots, first, 28)
    slots.reserve(second, 35)
    assert table(slots, second, 35) == expected_table(slots, second, 35)
    slots.release(first)
    assert slots.num_free_pages == 19 - 9, "of the first row's eight pages seven are the other's, too"


@pytest.mark.parametrize(
    ("prompt", "num_shared"),
    [
        (PROMPT[:9], 8),
        (PROMPT[:8], 4),
        ([*PROMPT[:8], 0, 1], 4),
        ([0, *PROMPT[1:]], 0),
        (PROMPT[:4], 0),
        (PROMPT[4:], 0),
        ([*PROMPT, 7, 8, 9], 28),
    ],
    ids=[
        "longer by one",
        "no token after the page",
        "another after it",
        "another first",
        "one page",
        "from the second page",
        "longer",
    ],
)
def test_a_page_is_shared_with_its_tokens_and_the_one_after(prompt, num_shared):
    slots = allocator()
    committed(slots, PROMPT)
    assert slots.num_shared_tokens(slots.prefix_keys(prompt)) == num_shared
    assert slots.num_common_tokens(slots.prefix_keys(prompt), slots.prefix_keys(PROMPT)) == num_shared


@pytest.mark.parametrize("num_rerun", [0, 1, 2, 3, 5])
def test_a_page_is_shared_with_as_many_tokens_after_it_as_a_draft_took(num_rerun):
    """The last of several modules takes the token num_rerun + 1 after its position."""
    slots = allocator(num_rerun=num_rerun)
    committed(slots, PROMPT)
    for length in range(len(PROMPT) + 1):
        num_pages = sum(end + num_rerun + 1 <= length for end in range(4, 30, 4))
        assert slots.num_shared_tokens(slots.prefix_keys(PROMPT[:length])) == 4 * num_pages
        longer = slots.prefix_keys([*PROMPT[:length], 0, 1, 2, 3, 4, 5])
        assert slots.num_common_tokens(slots.prefix_keys(PROMPT), longer) == 4 * num_pages


def test_what_is_kept_of_a_shared_page_does_not_grow_with_the_prompt():
    num_tokens = 4096
    geometry = CacheGeometry(num_tokens + 10, page_size=1)
    slots = SlotAllocator(geometry, Capacity(1, num_tokens, page_size=1), torch.device("cpu"))
    prompt = [token % 200 for token in range(num_tokens)]
    row = slots.admit(slots.prefix_keys(prompt))
    slots.reserve(row, num_tokens)
    tracemalloc.start()
    slots.share(row, slots.prefix_keys(prompt), num_tokens)
    num_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert slots.num_shared_tokens(slots.prefix_keys(prompt)) == num_tokens - 1
    assert num_bytes < 400 * num_tokens


@pytest.mark.parametrize(("num_committed", "num_shared"), [(0, 0), (3, 0), (4, 4), (24, 24), (30, 24)])
def test_a_page_whose_end_is_near_the_end_of_a_prompt_is_not_shared(num_committed, num_shared):
    slots = allocator(num_rerun=2)
    committed(slots, PROMPT, num_committed)
    assert slots.num_shared_tokens(slots.prefix_keys(PROMPT)) == num_shared


@pytest.mark.parametrize(("num_committed", "num_shared"), [(0, 0), (3, 0), (4, 4), (11, 8), (12, 12)])
def test_only_committed_pages_are_shared(num_committed, num_shared):
    slots = allocator()
    committed(slots, PROMPT, num_committed)
    assert slots.num_shared_tokens(slots.prefix_keys(PROMPT)) == num_shared


def test_a_shared_page_lives_as_long_as_somebody_holds_it():
    slots = allocator()
    first = committed(slots, PROMPT)
    pages = slots.pages(first)
    second = committed(slots, PROMPT)
    slots.release(first)
    assert slots.pages(second)[:7] == pages[:7]
    assert slots.num_free_pages == 19 - 8
    assert slots.num_shared_tokens(slots.prefix_keys(PROMPT)) == 28
    slots.release(second)
    assert slots.num_free_pages == 19
    assert slots.num_shared_tokens(slots.prefix_keys(PROMPT)) == 0, "a free page is found by nobody"
    assert not slots.in_use


def test_shared_pages_count_when_room_is_sought():
    slots = allocator(num_pages=11)
    committed(slots, PROMPT)
    assert slots.num_free_pages == 2
    assert not slots.can_admit(33, slots.prefix_keys([1] * 30))
    assert slots.can_admit(36, slots.prefix_keys(PROMPT))
    assert not slots.can_admit(37, slots.prefix_keys(PROMPT))
    row = slots.admit(slots.prefix_keys(PROMPT))
    with pytest.raises(OutOfSlotsError, match="needs 3 more pages of 4 tokens, 2 are free"):
        slots.reserve(row, 40)


def test_rows_run_out():
    slots = allocator(max_bs=1)
    slots.admit()
    assert not slots.can_admit(1)
    with pytest.raises(OutOfSlotsError, match="all 1 rows"):
        slots.admit()
    with pytest.raises(OutOfSlotsError, match="asks for 65 tokens; a table row holds 64"):
        slots.reserve(1, 65)


@pytest.mark.parametrize("seed", range(5))
def test_no_page_is_lost_or_given_twice(seed):
    rng = random.Random(seed)
    slots = allocator(num_pages=40, page_size=rng.choice((1, 3, 4)), max_bs=6)
    held: dict[int, list[int]] = {}
    for _ in range(300):
        prompt = [0] * rng.choice((0, 8, 12)) + [rng.randrange(3) for _ in range(rng.randint(1, 12))]
        if held and rng.random() < 0.45:
            row = rng.choice(list(held))
            del held[row]
            slots.release(row)
        elif slots.can_admit(len(prompt) + 2, slots.prefix_keys(prompt)):
            row = slots.admit(slots.prefix_keys(prompt))
            slots.reserve(row, len(prompt) + 2)
            slots.share(row, slots.prefix_keys(prompt), rng.randint(0, len(prompt)))
            held[row] = prompt
        pages = [page for row in held for page in slots.pages(row)]
        assert slots.num_free_pages + len(set(pages)) == 39
        assert 0 not in pages
        for row, prompt in held.items():
            assert table(slots, row, len(prompt)) == expected_table(slots, row, len(prompt))
            own = {page for other in held if other != row for page in slots.pages(other)}
            written = slots.pages(row)[len(prompt) // slots.geometry.page_size :]
            assert not own & set(written), "a page after the prompt is shared"
    for row in list(held):
        slots.release(row)
    assert not slots.in_use
    assert bool((slots.table // slots.geometry.page_size == 0).all()), "a free row points at somebody's pages"
    assert len({slots.admit() for _ in range(6)}) == 6, "a row is lost"
