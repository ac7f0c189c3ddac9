"""What the site has in addition to `docs`: CONTRIBUTING, CHANGELOG, linked source files, and a list of results.

A link to `../PATH` works in the repository; on the site it leads to a copy of that file at `source/PATH`.
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
OUTSIDE = re.compile(r"\]\(\.\./([^)#]+)")  # of a page that lies in `docs` itself


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files that lie outside of `docs`."""
    pages = [file for file in files if file.is_documentation_page() and "/" not in file.src_uri]
    linked = {path for page in pages for path in OUTSIDE.findall(page.content_string)}
    for source in sorted(linked | set(PAGES)):
        text = (ROOT / source).read_text()
        files.append(File.generated(config, PAGES.get(source, f"source/{source}"), content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links to the copies, and list the files of results on their page."""
    uri = page.file.src_uri
    if uri in PAGES.values():
        return markdown.replace("](docs/", "](")
    if uri.startswith("source/"):
        return re.sub(r"\]\((?:\.\./)+docs/", "](" + "../" * uri.count("/"), markdown)
    if uri == "index.md":
        page.meta["hide"] = ["navigation", "toc"]
    if uri == "results.md":
        found = sorted(file.src_uri for file in files if file.src_uri.startswith("results/"))
        markdown += "\n".join(f"- [`{name}`]({name})" for name in found)
    if "/" in uri:
        return markdown
    return OUTSIDE.sub(lambda link: "](" + PAGES.get(link[1], f"source/{link[1]}"), markdown)
