"""Engines of SGLang, each started once a session. Its tests run where SGLang is installed: `make test-sglang`."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.engines.sglang.cases import ADAPTIVE, STEP_TIMES, Case
from tests.engines.sglang.engine import Run, run

collect_ignore_glob = [] if find_spec("sglang") else ["test_*.py"]
USED = ("entrypoints.engine", "managers.detokenizer_manager", "speculative.eagle_worker_v2", "models.llama_eagle3")
BLOCKS = (
    "speculative.dflash_worker_v2",
    "models.dflash",
    "speculative.dspark_components.dspark_worker_v2",
    "models.dspark",
)


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> Path:
    """The folder of the converted models; and SGLang is imported, which every engine is a fork of."""
    from tests.engines.sglang.models import write_all

    for name in (*USED, *BLOCKS, "models.deepseek_nextn"):
        import_module(f"sglang.srt.{name}")
    folder = tmp_path_factory.mktemp("models")
    write_all(folder)
    steps = {bs: {"candidate_steps": found} for bs, found in ADAPTIVE.items()}
    (folder / "adaptive.json").write_text(json.dumps(steps))
    (folder / "step_times.json").write_text(json.dumps(STEP_TIMES))
    return folder


@pytest.fixture(scope="session")
def runs(models, tmp_path_factory) -> Callable[[Case], Run]:
    """What the engine of a case gave, once a session."""
    known: dict[Case, Run] = {}

    def of(case: Case) -> Run:
        if case not in known:
            known[case] = run(tmp_path_factory.mktemp(str(case)), **case.options(models))
        return known[case]

    return of
