"""`python -m attn_backends_reference COMMAND`: its commands, also where the package is not installed."""

import sys

from attn_backends.cli import guarded, run_command
from attn_backends_reference.cli import demo, generate, inspect_folders

COMMANDS = {"demo": demo.COMMAND, "generate": generate.COMMAND, "inspect": inspect_folders.COMMAND}

if __name__ == "__main__":
    if sys.argv[1:2] == [] or sys.argv[1] not in COMMANDS:
        sys.exit(f"usage: python -m attn_backends_reference {{{','.join(COMMANDS)}}} ...")
    name, *words = sys.argv[1:]
    sys.exit(guarded(lambda: run_command(f"attn-backends {name}", COMMANDS[name], words)))
