"""Items of `pytest --pyargs attn_backends.conformance --attn-backend NAME|module:Class`, one for each case."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from attn_backends.conformance.outcomes import Row
from attn_backends.conformance.plugin import ROW, Planned, conclude
from attn_backends.registry import list_backends


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """An item for each case; without a backend to test, one that says how to name it."""
    suite = metafunc.config.pluginmanager.get_plugin("attn_backends_conformance")
    planned = suite.planned() if suite is not None else [Planned("no_backend", _no_backend)]
    metafunc.parametrize("planned", planned, ids=[item.id for item in planned])


def test_case(planned: Planned, record_property: Callable[[str, object], None], pytestconfig: pytest.Config) -> None:
    """Run a case and end as its row says; the row is the item's property."""
    row = planned.run()
    record_property(ROW, json.dumps(row.to_dict()))
    conclude(row, planned.again, require_run=bool(pytestconfig.getoption("attn_require_run")))


def _no_backend() -> Row:
    names = ", ".join(list_backends())
    pytest.fail(f"name a backend: --attn-backend NAME or module:Class (names here: {names})", pytrace=False)
