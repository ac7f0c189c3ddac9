"""Where the time of an engine's cycles goes on the GPU, by SGLang's own profiler."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

from tests.engines.sglang.gpu.server import Server

ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
NUM_NAMED = 4


def profiled(server: Server, folder: Path, num_cycles: int, **asked: Any) -> dict[str, Any]:
    """Of one request: see `told`. num_cycles: that it takes. folder: for SGLang's trace."""
    folder.mkdir(parents=True, exist_ok=True)
    server.ask(profile=str(folder))
    server.ask(**asked)
    server.ask(profile="")
    (trace,) = folder.glob("*.trace.json.gz")
    with gzip.open(trace, "rt") as file:
        return told(json.load(file)["traceEvents"], num_cycles)


def told(events: list[dict[str, Any]], num_cycles: int) -> dict[str, Any]:
    """Microseconds a cycle: from the first kernel to the last, busy, and by the kernels that take longest, with their
    number of calls a cycle.
    """
    ran = [event for event in events if event.get("cat") in ON_GPU]
    if not ran:
        return {"span_us": 0.0, "busy_us": 0.0, "kernels": 0.0, "longest": []}
    times: Counter[str] = Counter()
    for event in ran:
        times[event["name"]] += event["dur"]
    calls = Counter(event["name"] for event in ran)
    span = max(event["ts"] + event["dur"] for event in ran) - min(event["ts"] for event in ran)
    longest = [
        [name[:60], round(time / num_cycles, 1), round(calls[name] / num_cycles, 2)]
        for name, time in times.most_common(NUM_NAMED)
    ]
    return {
        "span_us": round(span / num_cycles, 1),
        "busy_us": round(sum(times.values()) / num_cycles, 1),
        "kernels": round(len(ran) / num_cycles, 1),
        "longest": longest,
    }
