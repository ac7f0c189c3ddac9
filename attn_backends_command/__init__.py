"""The command `attn-backends`, which answers to an interrupt from its first moment on.

Whatever is inside of `attn_backends` is imported behind torch, which takes seconds; this is not.
"""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command line; returns its exit code."""
    try:
        from attn_backends import cli
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130
    return cli.main()
