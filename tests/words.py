"""The prose of documents, public docstrings, errors and help, by sentences, and what is wrong with a sentence.

python -m tests.words [PATH ...]      prints what is wrong, of certain files or of all
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.doc_blocks import BLOCK, DOCUMENTS, ROOT

MOST_WORDS = 35
TERMS = {  # what a sentence must not say: the field's term for it
    r"\bbehind\b[*]? (?:a|an|all|any|each|every|it|its|no|one|prefixes|several|shared|some|that|the|them|those|torch|"
    r"what|which|CODE|L)\b|\b(?:are counted|mask|padded|padding) behind\b": "after, at the end",
    r"\blists? of work\b": "work list",
    r"\btables? of (?:pages|page ids)\b": "page table",
    r"\bcaches? of keys and values\b": "KV cache",
    r"\bin pieces\b": "piecewise",
    r"\bleft-over\b": "padded",
    r"\btenants?\b": "owner",
    r"\b(?:the|an|no) aims?\b": "target",
    r"\b(?:tokens?|rows?|slots?|pages?|steps?|launch(?:es)?|cycles?|modules?) an? "
    r"(?:second|request|token|row|page|step|cycle|forward|layer|prompt)\b": "per",
    r"\bswitched (?:on|off) for good\b": "permanently",
}
IDIOMS = (
    r"\bshall\b",
    r"\b(?:says?|said) so\b",
    r"\b(?:no|some)body\b",
    r"\b(?:is|are|was|were|be) told\b",
    r"\bin words\b",
    r"\b(?:goes|go|going) on\b",
    r"\bwhose (?:it is|they are)\b",
    r"\banother than\b",
    r"\bparts? from (?!a\b|the\b)",
    r"\bin the place of\b",
    r"\bwill do\b",
    r"\bby now\b",
    r"\bat the (?:most|least)\b",
    r"\bheld (?:against|to)\b",
    r"\bwhat (?:it|they) (?:took|takes|take|has|have) (?:once|again|beside)\b",
    r"\b(?:takes?|took) (?:it|them) for\b",
    r"\bno (?:file|word|model|code) of (?:yours|ours)\b",
    r"\bgives? way\b",
    r"\bbeside[.,;:]",
    r"\bof which (?:each|one|some|none|all|those|that)\b",
    r"\bwhat of (?:it|them|a|the)\b",
    r"\bhow much of it\b",
    r"\bthe one by the other\b",
    r"\bat all times\b",
    r"\bsits? out\b",
    r"\bran which way\b",
    r"\bare there for\b",
    r"\bwhich is to\b",
    r"\b(?:is|are) what all\b",
    r"\bof which [`\w]+ are the rest\b",
    r"\bwhat lies behind\b",
    r"\bbut for (?:a|those)\b",
    r"^Kept, because\b",
    r"\bfor who\b",
    r"\bis without\b",
    r"\bthat is gone\b",
)
NO_SUBJECT = re.compile(r"(?:What|Which|Whose|Who|Where|Why|How|Of|That|Those)\b")  # "Whether x holds." is plain
PACKAGES = (
    "spec_metadata",
    "attn_backends",
    "attn_backends_command",
    "attn_backends_pytest",
    "benchmarks",
    "reference/attn_backends_reference",
)

CODE, LINK = re.compile(r"``[^`]+``|`[^`]*`"), re.compile(r"\[([^\]]*)\]\([^)]*\)")
SHAPE = re.compile(r"\[[^\]]*\]")  # [bs, width] is one word
WORD = re.compile(r"[^\W_][\w'’.,/^-]*")
SENTENCE = re.compile(r"(?<=[.!?])[*)\"]*\s+(?=[A-Z0-9(\"*]|vLLM|[a-z-]+\.md|\w+(?:, \w+)*: )")
PARAGRAPH = re.compile(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )|\n(?=\|)|\n(?=#)")
MARKS = re.compile(r"<!--[\s\S]*?-->|^:::.*\n(?:    .*\n)*", re.MULTILINE)
FORMULA = re.compile(r"^ {4,}.*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Sentence:
    """A sentence without markup; code in it is the word CODE. place: its file, or file and line of its docstring."""

    place: str
    text: str


def wrong(text: str) -> list[str]:
    """Complaints about a sentence."""
    length = len(WORD.findall(SHAPE.sub("SHAPE", text)))
    found = [f"{length} words, over {MOST_WORDS}"] if length > MOST_WORDS else []
    for pattern, term in TERMS.items():
        found += [f"{match[0]!r}: write {term}" for match in re.finditer(pattern, text, re.IGNORECASE)]
    for pattern in IDIOMS:
        found += [f"{match[0]!r}: say it plainly" for match in re.finditer(pattern, text, re.IGNORECASE)]
    return found


def sentences(text: str) -> Iterator[str]:
    """The sentences of Markdown: of paragraphs, list items, headings and cells of tables."""
    for paragraph in PARAGRAPH.split(MARKS.sub("", BLOCK.sub("\n\n", text))):
        cells = re.split(r"(?<!\\)\|", paragraph) if paragraph.lstrip().startswith("|") else [paragraph]
        for cell in cells:
            plain = LINK.sub(r"\1", CODE.sub("CODE", " ".join(cell.split()))).replace("**", "")
            yield from filter(None, SENTENCE.split(plain.strip()))


def of_documents() -> Iterator[Sentence]:
    """Sentences of the documents."""
    for document in DOCUMENTS:
        yield from (Sentence(str(document), text) for text in sentences((ROOT / document).read_text()))


def of_docstrings() -> Iterator[Sentence]:
    """Sentences of public docstrings, without formulas, which are indented."""
    for path in _sources():
        for node in public(ast.parse(path.read_text())):
            place = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"
            said = FORMULA.sub("", ast.get_docstring(node) or "")
            yield from (Sentence(place, text) for text in sentences(said))


def without_subject() -> Iterator[Sentence]:
    """Public docstrings whose first sentence hides what they describe in a clause."""
    seen = set[str]()
    for sentence in of_docstrings():
        if sentence.place not in seen and NO_SUBJECT.match(sentence.text):
            yield sentence
        seen.add(sentence.place)


def of_messages() -> Iterator[Sentence]:
    """Sentences of errors and of commands' help; a value in a message is the word CODE."""
    for path in _sources():
        for node in ast.walk(ast.parse(path.read_text())):
            parts = [node.exc] if isinstance(node, ast.Raise) and node.exc else []
            parts += [node.value] if isinstance(node, ast.keyword) and node.arg in ("help", "description") else []
            for part in parts:
                place = f"{path.relative_to(ROOT)}:{part.lineno}"
                yield from (Sentence(place, text) for said in _strings(part) for text in sentences(said))


def _strings(node: ast.AST) -> Iterator[str]:
    """The strings in an expression; of two that stand in one another, the outer one."""
    if isinstance(node, ast.JoinedStr):
        yield "".join(str(part.value) if isinstance(part, ast.Constant) else "CODE" for part in node.values)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    else:
        for child in ast.iter_child_nodes(node):
            yield from _strings(child)


def _sources() -> list[Path]:
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def public(node: ast.AST) -> Iterator[ast.Module | ast.ClassDef | ast.FunctionDef]:
    """A module and its public classes, functions and methods."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
        if not isinstance(node, ast.Module) and node.name.startswith("_"):
            return
        yield node
        for child in node.body:
            yield from public(child)


def main(paths: list[str]) -> None:
    """Print what is wrong, and where."""
    number = 0
    for sentence in [*of_documents(), *of_docstrings(), *of_messages()]:
        if not paths or any(sentence.place.startswith(path) for path in paths):
            for found in wrong(sentence.text):
                number += 1
                print(f"{sentence.place}: {found}\n    {sentence.text}")
    print(f"{number} to mend")


if __name__ == "__main__":
    main(sys.argv[1:])
