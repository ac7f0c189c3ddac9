"""Runs one part and writes its rows as they come."""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
import tempfile
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from attn_backends import results
from tests.engines.sglang.gpu import correctness, drafts, models, server, stand_ins, throughput

PARTS = {part.__name__.rpartition(".")[2]: part.rows for part in (correctness, drafts, stand_ins, throughput)}
DISTRIBUTIONS = ("sglang", "sglang-kernel", "transformers", "flashinfer-python", "sgl-flash-mla")


def main() -> int:
    """1 if a row is not as it should be."""
    parser = argparse.ArgumentParser(prog="python -m tests.engines.sglang.gpu", description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--only", default="", metavar="REGEX", help="cases in whose names it is found")
    parser.add_argument("--folder", type=Path, help="keeps models and logs; default: none are kept")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: server.end_all())
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "models").exists():
            models.write_all(folder / "models")
        command = ["python", "-m", "tests.engines.sglang.gpu", *sys.argv[1:]]
        head = results.head(shlex.split(shlex.join(command)), "cuda")
        head = replace(head, versions={**head.versions, **_versions()})
        failed = 0
        with results.Recording(args.json, head) as recording:
            for row in PARTS[args.part](folder / "models", folder, args.only):
                recording.add(row)
                failed += not row["ok"]
                print(row, flush=True)
            recording.finish()
    return int(failed > 0)


def _versions() -> dict[str, str]:
    found = {}
    for name in DISTRIBUTIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    sys.exit(main())
