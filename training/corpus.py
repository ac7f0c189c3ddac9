"""The byte corpus: Python's standard library, split by a fixed rule into three parts.

* ``heldout``: about a dozen typical files, frozen in ``reference/attn_backends_reference/models/heldout``;
* ``valid``: one file in fifty, watched during training;
* ``train``: the rest, without any file that is nearly a copy of a held-out one.

Run ``python -m training.corpus`` with CPython 3.11.7 to write ``.corpus/corpus.xz`` (train and
valid) and, with ``--freeze``, to copy the held-out files.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import random
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

SEPARATOR = b"\0"
HELDOUT_DIR = Path("reference/attn_backends_reference/models/heldout")
SKIP_DIRS = {"site-packages", "__pycache__"}
SKIP_PREFIXES = ("_sysconfigdata", "config-3")  # describe one build machine, not the library
TABLE_DIRS = {"encodings", "pydoc_data", "data", "bad_coding", "crashers"}  # not typical source
MIN_LINE = 16  # shorter lines say nothing about copying
NEAR_COPY = 0.3


@dataclass(frozen=True)
class Split:
    """Relative paths (POSIX) of each part and what was dropped as nearly a held-out copy."""

    train: list[str]
    valid: list[str]
    heldout: list[str]
    dropped: list[str]


def digest(name: str) -> str:
    """The fixed pseudo-random rank of a relative path."""
    return hashlib.sha256(name.encode()).hexdigest()


def read_sources(root: Path) -> dict[str, bytes]:
    """All ``.py`` files under ``root`` by relative path; files with a NUL byte are left out."""
    files: dict[str, bytes] = {}
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if SKIP_DIRS & set(relative.parts) or relative.parts[0].startswith(SKIP_PREFIXES):
            continue
        data = path.read_bytes()
        if data and SEPARATOR not in data:
            files[relative.as_posix()] = data
    return files


def is_typical(name: str, data: bytes) -> bool:
    """True for ASCII source of 12 to 48 KB outside the folders of tables and broken files."""
    return 12_000 <= len(data) <= 48_000 and data.isascii() and not TABLE_DIRS & set(name.split("/"))


def choose_heldout(files: dict[str, bytes]) -> list[str]:
    """The first eight library files and first four test files, in order of ``digest``."""
    ranked = sorted((n for n, d in files.items() if is_typical(n, d)), key=digest)
    tests = [n for n in ranked if n.startswith("test/") or "/test" in n]
    library = [n for n in ranked if n not in set(tests)]
    return sorted(library[:8] + tests[:4])


def lines_of(data: bytes) -> set[bytes]:
    """The set of stripped lines that are long enough to tell files apart."""
    return {line for raw in data.splitlines() if len(line := raw.strip()) >= MIN_LINE}


def is_near_copy(lines: set[bytes], heldout: list[set[bytes]]) -> bool:
    """True if a file shares ``NEAR_COPY`` of its own or of a held-out file's lines."""
    for other in heldout:
        smaller = min(len(lines), len(other))
        if smaller >= 10 and len(lines & other) >= NEAR_COPY * smaller:
            return True
    return False


def split_sources(files: dict[str, bytes]) -> Split:
    """Splits the files; the order of train and valid is a fixed shuffle."""
    heldout = choose_heldout(files)
    frozen = {files[name] for name in heldout}
    frozen_lines = [lines_of(files[name]) for name in heldout]
    train: list[str] = []
    valid: list[str] = []
    dropped: list[str] = []
    for name in sorted(files):
        if name in heldout:
            continue
        if files[name] in frozen or is_near_copy(lines_of(files[name]), frozen_lines):
            dropped.append(name)
        elif int(digest(name)[:8], 16) % 50 == 0:
            valid.append(name)
        else:
            train.append(name)
    random.Random(0).shuffle(train)
    return Split(train, valid, heldout, dropped)


def join(files: dict[str, bytes], names: list[str]) -> bytes:
    """One stream: the separator before each file and one at the end."""
    return SEPARATOR + SEPARATOR.join(files[name] for name in names) + SEPARATOR


def write_corpus(path: Path, files: dict[str, bytes], split: Split) -> None:
    """Writes an xz file: one JSON line with the lengths, then the train and valid streams."""
    train, valid = join(files, split.train), join(files, split.valid)
    header = {"train": len(train), "valid": len(valid), "train_files": len(split.train)}
    path.parent.mkdir(parents=True, exist_ok=True)
    with lzma.open(path, "wb", preset=6) as out:
        out.write(json.dumps(header).encode() + b"\n" + train + valid)


def read_corpus(path: Path) -> tuple[bytes, bytes]:
    """The train and valid streams that ``write_corpus`` stored."""
    with lzma.open(path, "rb") as stored:
        header, body = stored.read().split(b"\n", 1)
    lengths = json.loads(header)
    return body[: lengths["train"]], body[lengths["train"] :]


def freeze_heldout(root: Path, names: list[str], target: Path = HELDOUT_DIR) -> None:
    """Copies the held-out files as ``a.b.py.txt`` with the licence of the Python distribution."""
    target.mkdir(parents=True, exist_ok=True)
    for name in names:
        shutil.copyfile(root / name, target / (name.replace("/", ".") + ".txt"))
    shutil.copyfile(root / "LICENSE.txt", target / "LICENSE.txt")


def load_heldout(folder: Path = HELDOUT_DIR) -> dict[str, bytes]:
    """The frozen held-out files by file name."""
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.py.txt"))}


def main() -> None:
    """Splits the running interpreter's library and writes the corpus."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(".corpus/corpus.xz"))
    parser.add_argument("--freeze", action="store_true", help="copy the held-out files")
    args = parser.parse_args()
    if sys.version_info[:3] != (3, 11, 7):
        print("warning: the shipped checkpoints come from CPython 3.11.7", file=sys.stderr)
    root = Path(sysconfig.get_paths()["stdlib"])
    files = read_sources(root)
    split = split_sources(files)
    for part in ("train", "valid", "heldout", "dropped"):
        names = getattr(split, part)
        print(f"{part}: {len(names)} files, {sum(len(files[n]) for n in names)} bytes")
    print("\n".join(f"  heldout {n} {len(files[n])}" for n in split.heldout))
    print("\n".join(f"  dropped {n} {len(files[n])}" for n in split.dropped))
    if args.freeze:
        freeze_heldout(root, split.heldout)
    write_corpus(args.out, files, split)


if __name__ == "__main__":
    main()
