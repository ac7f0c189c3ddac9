"""The pictures of docs/explain.md are what the command draws today.

python -m tests.test_explain_docs draws them again.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from attn_backends.explain import explain, to_svg
from attn_backends.explain.examples import EXAMPLES, example_picture
from attn_backends.registry import get_backend
from spec_metadata import BlockTable, CacheGeometry, Capacity, Step

FOLDER = Path(__file__).parent.parent / "docs" / "explain"
DENSE = ("flashinfer_mla", "trtllm_mla", "fa3")
SHOWN = {"chain": ("fa3", "dsv4"), "packed": ("flashinfer_mla", "fa3"), "decode": ("flashinfer_mla", "trtllm_mla")}
CAPTURED = ("chain",)


def drawn(example: str) -> str:
    """The SVG of an example, on kernels that run anywhere; "wrong" is the page's own step."""
    if example == "wrong":
        return _wrong()
    captured = example in CAPTURED
    backends = map(get_backend, SHOWN.get(example, DENSE))
    return to_svg([example_picture(each, example, kernel="torch", captured=captured) for each in backends])


def _wrong() -> str:
    capacity = Capacity(max_bs=2, max_context=64, page_size=16, topk=1, num_steps=3, num_draft_tokens=4)
    geometry = CacheGeometry(num_pages=16, page_size=16)
    backend = get_backend("fa3")(capacity, geometry, kernel="torch")
    pages = torch.arange(1, 1 + 2 * capacity.max_pages).view(2, -1)
    step = Step.target_verify(4, torch.tensor([13, 40]), BlockTable(pages, geometry))
    meta = backend.init_forward_metadata(step)
    meta.buffers["seqused_k"][0, 1] -= 1
    return to_svg([explain(meta, step)])


@pytest.mark.parametrize("example", [*EXAMPLES, "wrong"])
def test_the_committed_picture_is_the_one_that_is_drawn(example):
    assert (FOLDER / f"{example}.svg").read_text() == drawn(example), "run python -m tests.test_explain_docs"


def test_the_page_shows_every_example():
    page = (FOLDER.parent / "explain.md").read_text()
    assert [name for name in (*EXAMPLES, "wrong") if f"(explain/{name}.svg)" not in page] == []


if __name__ == "__main__":
    for name in (*EXAMPLES, "wrong"):
        (FOLDER / f"{name}.svg").write_text(drawn(name))
