"""`docs/conforming.md`: packages whose backends conform, from a report each in `docs/conforming`.

python -m attn_backends.conformance.conforming [--reports docs/conforming] [--output docs/conforming.md]

A report is named PACKAGE-VERSION.json. It is of a run of all cases or of a profile, under this contract, in which
nothing failed, made small by `attn_backends.conformance.summary`.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from attn_backends.conformance.matrix import is_of_this_contract
from attn_backends.conformance.outcomes import EXECUTED_OK, Outcome, Report
from attn_backends.errors import AttnBackendsError, ConfigError
from attn_backends.results import read, write_text

COMMAND = "python -m attn_backends.conformance.conforming"
REPORTS, PAGE = Path("docs/conforming"), Path("docs/conforming.md")
_NAME = re.compile(r"(?P<package>.+)-(?P<version>\d[^-]*)")
_COLUMNS = ("package", "version", "backend/kernel", "passes", "contract", "suite", "device", "date")


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page; 2 if a report can't be read or does not conform."""
    parser = argparse.ArgumentParser(
        prog=COMMAND, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--reports", type=Path, default=REPORTS, help="default: %(default)s")
    parser.add_argument("--output", type=Path, default=PAGE, help="default: %(default)s")
    args = parser.parse_args(arguments)
    try:
        write_text(args.output, page(args.reports))
    except AttnBackendsError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


def page(reports: Path) -> str:
    """The whole page, the same for the same reports. Raises `ConfigError` for a report that does not conform."""
    lines = [
        "# Conforming packages",
        "",
        "Backends of other packages, and the [profiles](conformance.md#profiles) that they pass. Written by",
        f"`{COMMAND}` from one report for a package and version.",
        "[Contributing](../CONTRIBUTING.md#adding-a-conforming-package) says how to add one.",
        "",
        f"| {' | '.join(_COLUMNS)} |",
        "|" + "---|" * len(_COLUMNS),
    ]
    for path in sorted(reports.glob("*.json")):
        lines += [f"| {' | '.join(cells)} |" for cells in _rows(path)]
    return "\n".join(lines) + "\n"


def _rows(path: Path) -> Iterator[Sequence[str]]:
    """The cells of each kernel of a report."""
    name, found = _NAME.fullmatch(path.stem), read(path)
    if name is None:
        raise ConfigError(f"{path.name}: a report is named PACKAGE-VERSION.json, such as my_mla-1.2.0.json")
    try:
        is_of_this_contract(found)
        report = Report.of(found)
    except ConfigError as error:
        raise ConfigError(f"{path.name}: {error}") from None
    if report.exit_code(require_run=False) != EXECUTED_OK:
        wrong = report.counts[Outcome.FAIL] + report.counts[Outcome.ERROR]
        raise ConfigError(f"{path.name}: {wrong} cases failed or broke and {report.executed} ran; it does not conform")
    if not any(report.profiles.values()):
        raise ConfigError(f"{path.name}: no profile passes; run all cases, or those of one with --profile")
    link = f"[{name['version']}](conforming/{path.name})"
    where = (report.contract, report.suite_version, report.device, report.date)
    for kernel, profiles in report.profiles.items():
        if profiles:
            yield (name["package"], link, f"`{kernel}`", ", ".join(profiles), *where)


if __name__ == "__main__":
    raise SystemExit(main())
