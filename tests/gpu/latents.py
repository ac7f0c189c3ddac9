"""The conformance suite on our MLA kernel for Hopper, whatever number of rows its worlds have.

    python -m tests.gpu.latents --json FILE

The suite's small worlds have few query rows, which the kernel `gluon` leaves to Triton (`paged_operators.FEW_ROWS`).
Here it takes all of them. Exit code as of `attn-backends conformance`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from attn_backends.cli import main as run
from attn_backends.conformance import summary
from attn_backends.kernels import paged_operators

SUITE = ("conformance", "trtllm_mla", "flashinfer_mla", "--kernel", "gluon", "--device", "cuda", "--require-run")


def main() -> int:
    """Run the suite into a file, and keep its summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    args = parser.parse_args()
    paged_operators.FEW_ROWS = 0
    code = run([*SUITE, "--quick", "--json", str(args.json)])
    if args.json.exists():
        summary.main([str(args.json)])
    return code


if __name__ == "__main__":
    sys.exit(main())
