"""The code of the documents: every block, every command of a shell block, and why some are not run.

A block that a test can't run has a comment in front of it. With a pattern it speaks of some of a block's commands:

    <!-- not run: needs a GPU -->
    <!-- not run: `attn-backends bench *` needs a GPU -->

What takes minutes is run by `make test-full`, what needs an engine by `make test-sglang-full` or `make test-vllm-full`,
what needs a GPU by `make test-docs-gpu`.

    python -m tests.doc_blocks      prints how much is run, and how much is not for which reason
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted(
    path.relative_to(ROOT)
    for pattern in ("*.md", "docs/*.md", "docs/api/*.md", "examples/*/README.md", "*/README.md")
    for path in ROOT.glob(pattern)
)
LANGUAGES = ("python", "sh", "toml", "text")  # text is no code: output, or a layout
MINUTES, SGLANG, VLLM, GPU = (
    "takes minutes",
    "needs SGLang",
    "needs vLLM",
    "needs a GPU",
)  # run by `make test-full`, by the engines' tests, and by `make test-docs-gpu`
REASONS = (MINUTES, SGLANG, VLLM, GPU, "needs the network", "trains for minutes", "is make itself")

BLOCK = re.compile(r"(?P<marks>(?:^<!-- not run: .*-->\n)*)^```(?P<language>.*)\n(?P<text>[\s\S]*?)^```$", re.MULTILINE)
MARK = re.compile(r"<!-- not run: (?:`(.+)` )?(.+) -->")
COMMENT = re.compile(r"\s+#.*")


@dataclass(frozen=True, slots=True)
class Snippet:
    """A block of code, or one command of a shell block. line: where it begins. reason: why it is not run, or ""."""

    document: Path
    line: int
    language: str
    text: str
    reason: str

    def __str__(self) -> str:
        return f"{self.document}:{self.line}"


def snippets(document: Path) -> list[Snippet]:
    """What a document holds; `ValueError` names a block that has no language of ours, or a wrong comment in front."""
    return [found for block in BLOCK.finditer((ROOT / document).read_text()) for found in _of_block(document, block)]


def _of_block(document: Path, block: re.Match[str]) -> Iterator[Snippet]:
    language, line = block["language"], block.string.count("\n", 0, block.start("text")) + 1
    marks = {pattern or "*": reason for pattern, reason in MARK.findall(block["marks"])}
    if language not in LANGUAGES or not set(marks.values()) <= set(REASONS):
        raise ValueError(
            f"{document}:{line}: a block of {language!r}, not run: {marks}; languages: {LANGUAGES}, reasons: {REASONS}"
        )
    texts = _commands(line, block["text"]) if language == "sh" else [(line, block["text"])]
    unused = set(marks)
    for start, text in texts:
        pattern = next((pattern for pattern in marks if fnmatchcase(text, pattern)), None)
        unused.discard(pattern or "")
        yield Snippet(document, start, language, text, marks[pattern] if pattern else "")
    if unused:
        raise ValueError(f"{document}:{line}: `{unused.pop()}` in front of the block names no command of it")


def _commands(line: int, block: str) -> Iterator[tuple[int, str]]:
    """The commands of a shell block without their comments; one that goes on over lines is one command."""
    joined = re.sub(r"\\\n\s*", lambda match: "\0", block)
    for text in joined.splitlines():
        yield line, COMMENT.sub("", text.replace("\0", " "))
        line += 1 + text.count("\0")


def main() -> None:
    """Print the counts."""
    code = [found for document in DOCUMENTS for found in snippets(document) if found.language != "text"]
    counts = Counter(found.reason for found in code)
    run = counts.pop("")
    reasons = ", ".join(f"{number} ({reason})" for reason, number in counts.most_common())
    print(f"{len(code)} blocks and commands of {len(DOCUMENTS)} documents: {run} run; not run: {reasons}")


if __name__ == "__main__":
    main()
