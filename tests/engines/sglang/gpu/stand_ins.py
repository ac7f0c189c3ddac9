"""The stand-ins of SGLang's CPU operators beside its compiled Triton and CUDA ones, by their own tests."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from tests.engines.sglang.gpu.server import ENVIRONMENT, STUBS

TESTS = "tests/engines/sglang/test_stand_ins.py"
ON_A_CPU_ALONE = "test_any_other_name_imports_and_raises_when_it_is_called"


def rows(models: Path, folder: Path, chosen: str) -> Iterator[dict[str, Any]]:
    """One a test: how many of its cases were equal. chosen: an expression found in their names."""
    told = folder / "stand_ins.xml"
    options = ["-q", "--noconftest", "-p", "no:cacheprovider", "--deselect", f"{TESTS}::{ON_A_CPU_ALONE}"]
    path = os.pathsep.join([str(STUBS), os.environ.get("PYTHONPATH", "")])
    subprocess.run(
        [sys.executable, "-m", "pytest", TESTS, *options, f"--junitxml={told}"],
        env=os.environ | ENVIRONMENT | {"PYTHONPATH": path},
        check=False,
    )
    equal: Counter[str] = Counter()
    differ: Counter[str] = Counter()
    for case in ElementTree.parse(told).iter("testcase"):
        (differ if len(case) else equal)[case.attrib["name"]] += 1
    names = dict.fromkeys(name.partition("[")[0] for name in (*equal, *differ))
    for name in filter(re.compile(chosen).search, names):
        counts = [sum(n for each, n in found.items() if each.partition("[")[0] == name) for found in (equal, differ)]
        yield {"case": name, "ok": counts[1] == 0, "equal": counts[0], "differ": counts[1]}
