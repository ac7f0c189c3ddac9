"""`python -m attn_backends.cli`."""

import sys

from attn_backends.cli import main

sys.exit(main())
