"""vLLM's engine on a GPU: runs one part and writes its rows as they come."""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from attn_backends import results
from tests.engines.vllm.gpu import correctness, models, throughput

PARTS = {"correctness": correctness.rows, "bugs": correctness.bugs, "throughput": throughput.rows}


def extensions(package: str) -> dict[str, str]:
    """The version of a package, and of each module in it that is compiled: all come with its wheel."""
    spec = find_spec(package)
    folder = Path(spec.origin).parent if spec and spec.origin else Path()
    names = sorted(file.relative_to(folder.parent).as_posix().partition(".")[0] for file in folder.rglob("*.so"))
    return dict.fromkeys([package, *names], version(package))


def main() -> int:
    """1 if a row is not as it should be."""
    parser = argparse.ArgumentParser(prog="python -m tests.engines.vllm.gpu", description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--only", default="", metavar="PATTERN", help="cases whose names have it")
    parser.add_argument("--folder", type=Path, help="keeps models and logs; default: none are kept")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "models").exists():
            models.write_all(folder / "models")
        command = ["python", "-m", "tests.engines.vllm.gpu", *sys.argv[1:]]
        head = results.head(shlex.split(shlex.join(command)), "cuda")
        head = replace(head, versions={**head.versions, **extensions("vllm")})
        failed = 0
        with results.Recording(args.json, head) as recording:
            for row in PARTS[args.part](folder / "models", folder, args.only):
                recording.add(row)
                failed += not row["ok"]
                print(row, flush=True)
            recording.finish()
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
