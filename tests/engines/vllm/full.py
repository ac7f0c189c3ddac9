"""Every row of the product, with 64 prompts each: python -m tests.engines.vllm.full --json FILE [--only PATTERN]

A row is written as soon as it is done. A file of the same commit that is there already is continued.
"""

from __future__ import annotations

import argparse
import gc
import re
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from attn_backends import results
from attn_backends.errors import ConfigError
from tests.engines.vllm.environment import prepare

NUM_PROMPTS = 64


def outcome(row: Any, models: Path) -> dict[str, Any]:
    """What is kept of a row. compared: attention calls, with float64. padded: steps that a larger graph ran."""
    from tests.engines.vllm.engine import EngineFailed
    from tests.engines.vllm.laws import check

    start = time.monotonic()
    told: dict[str, Any] = {"row": str(row), "ok": False}
    try:
        found, shadow = check(row, models, NUM_PROMPTS)
        counts = {"steps": found.steps.total(), "compared": shadow.compared.total(), "padded": found.padded}
        told |= {"ok": True} | counts
    except (AssertionError, EngineFailed) as error:
        told["failed"] = results.without_folders(str(error))[:400]
    return told | {"seconds": round(time.monotonic() - start)}


def done_before(path: Path, commit: str) -> list[dict[str, Any]]:
    """Rows of a file, none if it is not there. Raises `ConfigError` where they are of another commit."""
    if not path.exists():
        return []
    kept = results.read(path)
    if kept.head.commit != commit:
        raise ConfigError(f"{path} has rows of {kept.head.commit}, and this is {commit}; name another --json")
    return [dict(row) for row in kept.rows]


def main() -> int:
    """1 if a row failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.engines.vllm.full", description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--only", default="", metavar="PATTERN", help="rows whose names have it")
    args = parser.parse_args()
    head = results.head(["python", "-m", "tests.engines.vllm.full", *sys.argv[1:]])
    args.json.parent.mkdir(parents=True, exist_ok=True)
    before = done_before(args.json, head.commit)
    with prepare(), TemporaryDirectory() as folder, results.Recording(args.json, head) as recording:
        from tests.engines.vllm.models import write_models
        from tests.engines.vllm.rows import full_product

        for told in before:
            recording.add(told)
        models = write_models(Path(folder))
        gc.freeze()  # vLLM collects garbage 16 times a row, which else looks at every module
        failed = sum(not told["ok"] for told in before)
        for row in full_product():
            if re.search(args.only, str(row)) and str(row) not in {told["row"] for told in before}:
                told = outcome(row, models)
                recording.add(told)
                failed += not told["ok"]
                print(told, flush=True)
        recording.finish()
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
