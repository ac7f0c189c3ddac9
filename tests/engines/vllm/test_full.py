"""The full product's rows are kept one by one, and a run that was cut off is continued."""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from attn_backends import results
from attn_backends.errors import ConfigError
from tests.engines.vllm import full
from tests.engines.vllm.rows import full_product


def test_a_run_that_was_cut_off_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, ran = tmp_path / "rows.json", []

    def outcome(row: Any, models: Path) -> dict[str, Any]:
        if len(ran) == 2:
            ran.append("cut off")
            raise KeyboardInterrupt
        ran.append(str(row))
        return {"row": str(row), "ok": True}

    monkeypatch.setattr(full, "outcome", outcome)
    monkeypatch.setattr(full, "prepare", TemporaryDirectory)
    monkeypatch.setattr(sys, "argv", ["full", "--json", str(path), "--only", "gqa-fa3-none"])
    wanted = [str(row) for row in full_product() if str(row).startswith("gqa-fa3-none")]
    with pytest.raises(KeyboardInterrupt):
        full.main()
    assert not results.read(path).is_complete
    assert full.main() == 0
    assert ran == [*wanted[:2], "cut off", *wanted[2:]]
    assert [row["row"] for row in results.read(path).rows] == wanted
    assert results.read(path).is_complete


def test_rows_of_another_commit_are_not_continued(tmp_path: Path) -> None:
    head = results.Head("CPU", {}, "2026-11-24", "a" * 40, "full")
    results.write(tmp_path / "rows.json", head, [{"row": "one", "ok": True}])
    assert full.done_before(tmp_path / "rows.json", "a" * 40) == [{"row": "one", "ok": True}]
    with pytest.raises(ConfigError, match=r"has rows of a+, and this is b+; name another --json"):
        full.done_before(tmp_path / "rows.json", "b" * 40)
