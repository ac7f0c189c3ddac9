"""The commands that show a case again: its check, and a picture of its metadata."""

from __future__ import annotations

import shlex

from attn_backends.conformance.catalogue import group_of
from attn_backends.conformance.outcomes import Row

WITHOUT_PICTURE = ("refusals", "api")  # groups of checks that plan nothing


def again(row: Row, name: str, device: str, case: str) -> str:
    """The command that runs a row's case alone. name: of the backend, or module:Class. device: cpu or cuda. case: a
    file, or JSON.
    """
    return shlex.join(["attn-backends", "conformance", name, *_options(row, device, case)])


def picture(row: Row, name: str, device: str, case: str) -> str:
    """The command that draws the metadata of a row's case, wrong rows marked; "" if its check plans none. Arguments as
    `again`.
    """
    if group_of(row.check) in WITHOUT_PICTURE:
        return ""
    return shlex.join(["attn-backends", "explain", name, *_options(row, device, case)])


def _options(row: Row, device: str, case: str) -> list[str]:
    return ["--device", device, "--kernel", row.kernel, "--case", case]
