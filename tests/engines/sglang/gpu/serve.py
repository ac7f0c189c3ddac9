"""One engine: options on the command line, requests as lines of JSON on the standard input, answers likewise."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def main() -> None:
    """Until the input ends. SGLang's processes write where this one's errors go."""
    start = time.perf_counter()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    from sglang import Engine

    engine = Engine(**json.loads(sys.argv[1]))
    print(json.dumps({"seconds": round(time.perf_counter() - start, 1)}), file=answers)
    for line in sys.stdin:
        print(json.dumps(answer(engine, json.loads(line))), file=answers)


def answer(engine: Any, request: dict[str, Any]) -> dict[str, Any]:
    """{"flush": True} empties the cache, at which the probe writes down what it saw. {"profile": FOLDER} starts
    SGLang's profiler, {"profile": ""} ends it. All else is generated.
    """
    start = time.perf_counter()
    if request.pop("flush", False):
        time.sleep(0.2)  # what runs ahead of the last answer ends
        engine.flush_cache()
        return {"seconds": time.perf_counter() - start}
    if (folder := request.pop("profile", None)) is not None:
        _profile(engine, folder)
        return {"seconds": time.perf_counter() - start}
    out = engine.generate(**request)
    return {"seconds": time.perf_counter() - start, "answers": [_told(one) for one in out]}


def _profile(engine: Any, folder: str) -> None:
    if folder:
        engine.start_profile(output_dir=folder, activities=["GPU"], with_stack=False, record_shapes=False)
    else:
        engine.stop_profile()


def _told(one: dict[str, Any]) -> dict[str, Any]:
    """gaps: between the two best scores of each token, where they were asked for."""
    info = one["meta_info"]
    gaps = [round(top[0][0] - top[1][0], 4) for top in info.get("output_top_logprobs") or []]
    return {
        "ids": one["output_ids"],
        "cached": info.get("cached_tokens", 0),
        "accepted": info.get("spec_accept_length"),
        "gaps": gaps,
    }


if __name__ == "__main__":
    main()
