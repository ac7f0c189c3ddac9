"""Links and anchors of the documents lead somewhere, in the repository and on the site; its nav has every page."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from pathlib import Path

import pytest

import attn_backends
import spec_metadata
from attn_backends import conformance, explain
from tests.doc_blocks import BLOCK, DOCUMENTS, ROOT

LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
NAME = re.compile(r"^::: (\S+)$", re.MULTILINE)
NAV = (ROOT / "mkdocs.yml").read_text()
PAGES = [page for page in DOCUMENTS if page.parts[0] == "docs"]
API = [page for page in PAGES if page.parts[1] == "api"]


def prose(document: Path) -> str:
    """A document without its code blocks, whose comments look like headings."""
    return BLOCK.sub("", document.read_text())


def anchors(document: Path) -> set[str]:
    """What a link may end in: slugs of headings, which GitHub and the site make alike, and names of the API."""
    text = prose(document)
    headings = (re.sub(r"\[([^\]]*)\]\([^)]*\)|`", r"\1", heading) for heading in HEADING.findall(text))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings} | set(
        NAME.findall(text)
    )


def broken_links(document: Path) -> list[str]:
    """Relative links of a document that name no file or no anchor, or, on the site, a folder."""
    broken = []
    for link in LINK.findall(prose(document)):
        path, _, anchor = link.partition("#")
        target = document.parent / path if path else document
        if "://" in link:
            continue
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
        elif target.is_dir() and document.is_relative_to(ROOT / "docs"):
            broken.append(f"{link}: a folder, which has no page on the site")
    return broken


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_links_and_anchors_lead_somewhere(document):
    assert broken_links(ROOT / document) == []


@pytest.mark.parametrize("link", ["gone.md", "design.md#gone", "#gone", "results"])
def test_a_broken_link_is_seen(link, monkeypatch):
    page = ROOT / "docs" / "index.md"
    monkeypatch.setattr(Path, "read_text", lambda path: f"[here]({link})" if path == page else "# Design\n")
    assert len(broken_links(page)) == 1


def test_the_site_s_navigation_has_every_page():
    assert [str(page) for page in PAGES if f" {page.relative_to('docs')}\n" not in NAV] == []


@pytest.mark.parametrize("page", API, ids=str)
def test_the_api_s_pages_show_names_that_exist(page):
    for name in NAME.findall((ROOT / page).read_text()):
        module, _, attribute = name.rpartition(".")
        assert hasattr(import_module(module), attribute) or import_module(name), name


@pytest.mark.parametrize(
    "package", [spec_metadata, attn_backends, conformance, explain], ids=lambda package: package.__name__
)
def test_the_api_s_pages_show_every_public_class_and_function(package):
    shown = {name for page in API for name in NAME.findall((ROOT / page).read_text())}
    public = {
        name for name in package.__all__ if inspect.isroutine(it := getattr(package, name)) or inspect.isclass(it)
    }
    assert {f"{package.__name__}.{name}" for name in public} - shown == set()
