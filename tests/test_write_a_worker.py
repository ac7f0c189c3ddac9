"""The guide for authors of workers: its blocks run as they stand, with public names only, and are what it says."""

from __future__ import annotations

import re

from tests.test_conformance_pages import DOCS, ROOT, blocks, private_imports

PAGE = "write-a-worker.md"


def test_its_blocks_run_one_after_the_other():
    source = "\n".join(blocks(PAGE, "python"))
    assert private_imports(source) == []
    assert source.count("assert") > 8
    exec(compile(source, PAGE, "exec", dont_inherit=True), {"__name__": "guide"})


def test_the_example_of_the_readme_leads_to_it():
    example = (ROOT / "README.md").read_text().split("## Example")[1].split("\n## ")[0]
    assert f"docs/{PAGE}" in example


def test_its_links_lead_somewhere():
    links = re.findall(r"\]\(([^)#]+)\)", (DOCS / PAGE).read_text())
    assert links
    assert [link for link in links if not (DOCS / link).exists()] == []
