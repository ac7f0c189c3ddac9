"""A badge of a conformance report, as an SVG file for a package's page.

python -m attn_backends.conformance.badge REPORT.json BADGE.svg

It names the contract and the profiles that every kernel of the report passes; or how many cases failed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path

from attn_backends.conformance.outcomes import EXECUTED_OK, Outcome, Report
from attn_backends.errors import AttnBackendsError
from attn_backends.results import read, write_text

COMMAND = "python -m attn_backends.conformance.badge"
LABEL = "attention conformance"
GREEN, RED, GREY = "#2e7d32", "#c62828", "#757575"
NAMED = 3  # profiles; of more the number is told
CHARACTER, MARGIN = 6.6, 10  # of 11 px Verdana, in px

_SVG = """\
<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="20" role="img" aria-label="{title}">
<title>{title}</title>
<rect width="{left}" height="20" fill="#424242"/>
<rect x="{left}" width="{right}" height="20" fill="{colour}"/>
<g fill="#fff" font-family="Verdana, DejaVu Sans, sans-serif" font-size="11" text-anchor="middle">
<text x="{label_at}" y="14">{label}</text>
<text x="{message_at}" y="14">{message}</text>
</g>
</svg>
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the badge; 2 if the report can't be read or the badge not be written."""
    parser = argparse.ArgumentParser(
        prog=COMMAND, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("report", type=Path, metavar="REPORT.json")
    parser.add_argument("badge", type=Path, metavar="BADGE.svg")
    args = parser.parse_args(arguments)
    try:
        write_text(args.badge, badge(Report.of(read(args.report))))
    except AttnBackendsError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


def badge(report: Report) -> str:
    """The badge as SVG."""
    message, colour = _message(report)
    left, right = _width(LABEL), _width(message)
    return _SVG.format(
        title=escape(f"{LABEL}: {message}"),
        width=left + right,
        left=left,
        right=right,
        label=LABEL,
        message=escape(message),
        label_at=left / 2,
        message_at=left + right / 2,
        colour=colour,
    )


def _message(report: Report) -> tuple[str, str]:
    counts = report.counts
    if wrong := counts[Outcome.FAIL] + counts[Outcome.ERROR]:
        return f"{wrong} of {report.executed + counts[Outcome.ERROR]} failed", RED
    if report.exit_code(require_run=False) != EXECUTED_OK:
        return "nothing ran", GREY
    by_kernel = [list(names) for names in report.profiles.values()]
    common = [name for name in by_kernel[0] if all(name in names for names in by_kernel)] if by_kernel else []
    told = f"{len(common)} profiles" if len(common) > NAMED else ", ".join(common) or f"{report.executed} checks"
    return f"contract {report.contract or 'unknown'}: {told}", GREEN


def _width(text: str) -> int:
    return round(len(text) * CHARACTER) + MARGIN


if __name__ == "__main__":
    raise SystemExit(main())
