"""Values that checking mode refuses in words: masks, ancestors and visible slots (`test_admission` has the rest)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attn_backends.backend import AttentionBackend
from attn_backends.backends.fa3 import FA3Backend
from attn_backends.graphs import RecordedGraph
from spec_metadata import BlockTable, CacheGeometry, Capacity, DraftTree, InvalidStepError, RequestTable, Step, StepKind
from spec_metadata.admission import check_values, check_write_slots

CAPACITY = Capacity(3, 24, 4, topk=3, num_steps=3, num_draft_tokens=6)
GEOMETRY = CacheGeometry(20, 4, reserved_page=2)
PAGES = [[0, 1, 3, 4, 5, 6, 7, 8, 9], [10, 11, 12, 13, 14, 15, 16, 17, 18]]
LENS = torch.tensor([5, 9])


def paging_of(form: type, pages: list[list[int]] = PAGES) -> RequestTable | BlockTable:
    """Two requests; the request table has their pages in its rows 2 and 1."""
    table = torch.tensor(pages, dtype=torch.int32)
    if form is BlockTable:
        return BlockTable(table, GEOMETRY)
    slots = (table.unsqueeze(2) * 4 + torch.arange(4)).flatten(1)
    rows = torch.cat((torch.full_like(slots[:1], 8), slots.flip(0)))
    return RequestTable(rows, torch.tensor([2, 1]), GEOMETRY)


def mask_of(request: int, node: int, *seen: int) -> torch.Tensor:
    """[2, 6, 6]: chains, but for what one node of one request sees."""
    mask = torch.ones(2, 6, 6, dtype=torch.bool).tril()
    mask[request, node] = False
    mask[request, node, list(seen)] = True
    return mask


PAGING = paging_of(RequestTable)


def verify(mask: torch.Tensor) -> Step:
    return Step.target_verify(6, LENS, PAGING, tree_mask=mask)


MASKS = {
    "node 3 of request 1 sees nothing; it sees itself at least": mask_of(1, 3),
    "node 0 of request 0 sees nothing": mask_of(0, 0),
    "node 3 of request 1 does not see itself": mask_of(1, 3, 0, 2),
    "node 4 of request 0 does not see the root, node 0": mask_of(0, 4, 2, 4),
    "node 2 of request 1 sees node 5, which comes later": mask_of(1, 2, 0, 2, 5),
    "node 0 of request 1 sees node 1, which comes later": mask_of(1, 0, 0, 1),
    r"node 3 of request 1 sees \[0, 2\] before itself, but its parent, node 2, sees \[0, 1, 2\]": mask_of(
        1, 3, 0, 2, 3
    ),
    r"node 3 of request 0 sees \[0, 1, 2\] before itself, but its parent, node 2, sees \[0, 2\]": mask_of(0, 2, 0, 2),
}


@pytest.fixture
def backend() -> AttentionBackend:
    return FA3Backend(CAPACITY, GEOMETRY, checking=True)


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "replay"])
@pytest.mark.parametrize("message", MASKS)
def test_masks_that_are_no_tree_s(backend: AttentionBackend, message: str, captured: bool) -> None:
    parents = torch.tensor([[0, 0, 0, 1, 1, 2], [0, 0, 1, 2, 2, 4]])
    good, bad = verify(DraftTree.from_parents(parents, parents, 4).mask), verify(MASKS[message])
    backend.init_forward_metadata(good)
    meta = backend.capture(CAPACITY.bucket(StepKind.TARGET_VERIFY, 3), good.paging)
    backend.replay(meta, good)
    with pytest.raises(InvalidStepError, match=message):
        backend.replay(meta, bad) if captured else backend.init_forward_metadata(bad)


def test_masks_of_padded_requests_are_not_read() -> None:
    step = replace(verify(mask_of(1, 3)), num_real=torch.ones(1, dtype=torch.int32))
    check_values(step, CAPACITY)


PATHS = {
    r"branch 1 of request 0 has ancestors \[99, 1\]": (0, 1, [99, 1]),
    r"branch 2 of request 1 has ancestors \[-1, 2\]": (1, 2, [-1, 2]),
    r"branch 0 of request 1 has ancestors \[0, 2\]": (1, 0, [0, 2]),
}


@pytest.mark.parametrize("form", [RequestTable, BlockTable])
@pytest.mark.parametrize("message", PATHS)
def test_ancestors_that_are_no_path(backend: AttentionBackend, message: str, form: type) -> None:
    step = Step.draft_decode(3, 3, LENS, paging_of(form))
    meta = backend.init_forward_metadata(step)
    ancestors = torch.tensor([[[2, 0], [0, 1], [2, 2]]] * 2)
    meta.at(1, ancestors)
    request, branch, path = PATHS[message]
    ancestors[request, branch] = torch.tensor(path)
    with pytest.raises(InvalidStepError, match=message + r"; .* in \[0, 3\), the last one the branch itself"):
        meta.at(1, ancestors)
    FA3Backend(CAPACITY, GEOMETRY).init_forward_metadata(step).at(1, ancestors)


def test_ancestors_are_read_outside_of_a_capture(backend: AttentionBackend) -> None:
    """A graph's own ancestors are those of its replays, which nobody reads; those that it is warmed up with are."""
    meta = backend.capture(CAPACITY.bucket(StepKind.DRAFT_DECODE, 2), PAGING)
    backend.replay(meta, Step.draft_decode(3, 3, LENS, PAGING))
    wrong = torch.full((2, 3, 1), 99)
    with pytest.raises(InvalidStepError, match=r"branch 0 of request 0 has ancestors \[99\]"):
        meta.at(0, wrong)
    RecordedGraph().capture(lambda: meta.at(0, wrong))
    backend.replay(meta, Step.idle(PAGING.on_static(torch.empty(0, dtype=torch.int64))))
    meta.at(0, wrong)  # no request is real


@pytest.mark.parametrize("form", [RequestTable, BlockTable])
@pytest.mark.parametrize(
    ("column", "page", "message"),
    [
        (1, 2, "request 1 sees slot 8 of the reserved page, which is padding's"),
        (2, 10, "request 1 sees slot 40 twice"),
        (2, 11, "request 1 sees slot 44 twice"),
    ],
)
def test_pages_that_a_request_can_not_have(
    backend: AttentionBackend, form: type, column: int, page: int, message: str
) -> None:
    pages = [list(row) for row in PAGES]
    pages[1][column] = page
    with pytest.raises(InvalidStepError, match=message):
        backend.init_forward_metadata(Step.decode(LENS, paging_of(form, pages)))
    behind = [list(row) for row in PAGES]
    behind[1][5] = page
    backend.init_forward_metadata(Step.decode(LENS, paging_of(form, behind)))


@pytest.mark.parametrize(
    ("visible", "message"),
    [
        ([[44, 45], [9]], "request 1 sees slot 9 of the reserved page"),
        ([[44, 45, 44], [52]], "request 0 sees slot 44 twice"),
        ([[44, 45], [-1]], r"request 1 sees slot -1, outside \[0, 80\)"),
    ],
)
def test_host_mirrors_of_what_requests_see(visible: list[list[int]], message: str) -> None:
    with pytest.raises(InvalidStepError, match=message):
        check_write_slots([[40], [60]], visible, GEOMETRY)
    check_write_slots([[40], [60]], [[44, 45], [44, 45, 46]], GEOMETRY)
