"""The pytest plugin of attn-backends: its options, and nothing else until `--attn-backend` is given.

    pytest --pyargs attn_backends.conformance --attn-backend my_package.mine:MyBackend

or, in a test file of one's own:

    @parametrize_with_checks(MyBackend)
    def test_my_backend(check):
        check()

Every pytest run of an environment loads it, so it imports neither torch nor `attn_backends`, whose package needs torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


def parametrize_with_checks(
    *backends: Any,
    kernel: str = "auto",
    device: str = "cpu",
    expected_failures: Any = (),
    require_run: bool = False,
    **asked: Any,
) -> pytest.MarkDecorator:
    """Run a test once for each case of the conformance suite; its argument `check` is called to run the case.

    backends: classes, instances, factories (capacity, geometry, device, **options), or names. An instance stands for
    others of its class with the same options, which it must have as attributes of the same names. kernel, device,
    expected_failures (`ExpectedFailure`), require_run: as of the other doors. asked: which cases, as of `Selection`:
    select, quick, profile, effort, seed, contract. An expected failure is an xfail, what can't run here a skip. Raises
    `AttnBackendsError` for what can't be used.
    """
    from attn_backends.conformance.plugin import parameters

    found = parameters(backends, kernel, device, expected_failures, require_run=require_run, asked=asked)
    return pytest.mark.parametrize("check", list(found.values()), ids=list(found))


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of the suite, in a group of their own."""
    add = parser.getgroup("attn-backends", "conformance of attention backends").addoption
    add(
        "--attn-backend",
        action="append",
        default=[],
        metavar="NAME|module:Class",
        help="a backend to test with `--pyargs attn_backends.conformance`; may be repeated",
    )
    add("--attn-kernel", default="auto", metavar="NAME", help="one of its kernels (default: auto, every one that runs)")
    add("--attn-device", default="cpu", metavar="DEVICE", help="such as cpu or cuda (default: cpu)")
    add("--attn-quick", action="store_true", help="three cases of each check, of which --attn-seed picks one")
    add("--attn-select", default="*", metavar="PATTERN", help="checks to run, such as 'graph.*,math.decode'")
    add("--attn-profile", default="", metavar="NAME", help="one part of the suite, such as chain-graph")
    add("--attn-effort", type=int, default=0, metavar="N", help="N random cases more of each group of checks")
    add("--attn-seed", type=int, default=0, metavar="SEED", help="of the quick and of the random cases (default: 0)")
    add("--attn-contract", metavar="VERSION", help="of the contract to check (default: the suite's)")
    add("--attn-config", type=Path, metavar="FILE", help="a TOML file with [[expected_failures]]")
    add("--attn-require-run", action="store_true", help="what this machine can't run is a failure")
    add("--attn-json", type=Path, metavar="FILE", help="write the report as JSON")


def pytest_configure(config: pytest.Config) -> None:
    """Load the suite if it is used."""
    if config.getoption("attn_backend"):
        pytest.register_assert_rewrite("attn_backends.conformance")
        from attn_backends.conformance.plugin import Suite

        config.pluginmanager.register(Suite(config), "attn_backends_conformance")
