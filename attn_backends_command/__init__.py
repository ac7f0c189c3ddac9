"""The command `attn-backends`, which answers to an interrupt from its first moment on.

Importing anything of `attn_backends` imports torch first, which takes seconds; importing this does not.
"""

from __future__ import annotations

import signal
import sys
from types import FrameType


def main() -> int:
    """Run the command line; returns its exit code."""
    came = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal came
        came = True
        signal.default_int_handler(number, frame)

    answers = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # a background job's shell ignores it
    if answers:
        signal.signal(signal.SIGINT, interrupt)
    try:
        from attn_backends import cli
    except BaseException as error:  # what an import makes of an interrupt may be another error, or none
        came |= isinstance(error, KeyboardInterrupt)
        if not came:
            raise
    finally:
        if answers:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    if came:
        sys.stderr.write("interrupted\n")
        return 130
    return cli.main()
