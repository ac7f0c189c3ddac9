"""`python -m tests.gpu NAME --json FILE [--device cpu]`: what `attn-backends conformance --device cuda` cannot ask.

Each name is a module here whose `rows(device)` yields rows with a `status`. Exit code 1 if one fails.
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path

from attn_backends import results

NAMES = ("drafts", "flashinfer_schedules", "floors", "graphs", "planners")
NAMES += ("replays", "schedules", "skewed", "syncs", "uploads", "workers")


def main() -> int:
    """Run one of them; 1 if a row fails."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--json", required=True, type=Path, metavar="FILE")
    parser.add_argument("--device", default="cuda", help="where the module can run elsewhere (default: %(default)s)")
    args = parser.parse_args()
    command = ["python", "-m", "tests.gpu", args.name, "--json", str(args.json)]
    failed = 0
    with results.Recording(args.json, results.head(command, args.device)) as recording:
        for row in import_module(f"tests.gpu.{args.name}").rows(args.device):
            recording.add(row)
            print(*row.values(), flush=True)
            failed += row["status"] == "fail"
    recording.finish()
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
