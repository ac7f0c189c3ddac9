"""The conformance suite on our MLA kernel for Hopper, whatever number of rows its worlds have.

    python -m tests.gpu.latents --json FILE

The suite's small worlds have few query rows, which the kernel leaves to Triton (`paged_operators.FEW_ROWS`). Here it
takes all of them. Exit code as of `attn-backends conformance --require-run`.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from attn_backends.conformance import run_conformance, summary
from attn_backends.kernels import paged_operators

KERNELS = {"trtllm_mla": "gluon", "flashinfer_mla": "gluon", "fa3": "gluon_mla"}


def main(device: str = "cuda") -> int:
    """Run the suite, and keep its summary in a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    args = parser.parse_args()
    paged_operators.FEW_ROWS = 0
    reports = [run_conformance(name, kernel=kernel, device=device, quick=True) for name, kernel in KERNELS.items()]
    rows = tuple(row for report in reports for row in report.rows)
    report = replace(reports[0], rows=rows, command=f"python -m tests.gpu.latents --json {args.json.name}")
    args.json.write_text(summary.summary(report).to_json(), encoding="utf-8")
    return report.exit_code(require_run=True)


if __name__ == "__main__":
    sys.exit(main())
