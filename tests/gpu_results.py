"""Results of a GPU, part by part: what `make gpu-results` runs. docs/results.md lists those of other commands.

    python -m tests.gpu_results [--out docs/results/h200] [PART ...]

Each part is one command of less than ten minutes that writes one file. A part whose file holds this commit's result is
skipped, so an interrupted run goes on where it was. All parts must come from one machine and one commit: a folder that
holds results of another device is refused. Where git knows nothing of the tree, ATTN_BACKENDS_COMMIT names the commit.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

from attn_backends import results
from attn_backends.conformance import summary
from attn_backends.errors import AttnBackendsError, BackendUnavailableError
from attn_backends.registry import BUILT_IN
from tests.gpu.__main__ import NAMES

LIMIT = 600
OUT = Path("docs/results/h200")
CLI = "attn_backends.cli"
REFERENCE = "attn_backends_reference"
SUITE = f"{CLI} conformance --device cuda --require-run"
PARTS = {
    **{f"conformance_{name}": f"{SUITE} {name} --json {{file}}" for name in BUILT_IN if name != "dsv4"},
    **{
        f"conformance_dsv4_{kernel}": f"{SUITE} dsv4 --kernel {kernel} --json {{file}}"
        for kernel in ("flashmla_sparse", "triton", "torch")
    },
    "latents": "tests.gpu.latents --json {file}",
    "demo_float32": f"{REFERENCE} demo --device cuda --dtype float32 --kernel torch --json {{file}}",
    "demo_bfloat16": f"{REFERENCE} demo --device cuda --dtype bfloat16 --json {{file}}",
    "demo_8bit": f"{REFERENCE} demo --backend dsv4 --device cuda --dtype bfloat16 --cache-dtype float8_e4m3fn "
    "--json {file}",
    "bench_attention": "benchmarks raw --json {file}",
    **{
        f"kernels_{name}": f"benchmarks kernels --backend {name} --json {{file}}"
        for name in BUILT_IN
        if name != "reference"
    },
    "kernels_prefill": "benchmarks prefill --json {file}",
    "kernels_untuned": "benchmarks kernels --batch-size 20 100 --context 5003 --json {file}",
    **{name: f"benchmarks {name} --json {{file}}" for name in ("trees", "ragged", "mixed", "sampling")},
    **{f"bench_{name}": f"benchmarks {name} --json {{file}}" for name in ("memory", "eager", "steps")},
    "plan_graphs": "benchmarks plans --json {file}",
    "adaptive_times": "training.adaptive --times {file}",
    **{name: f"tests.gpu {name} --json {{file}}" for name in NAMES},
    "tile_words": "tests.tile_words --json {file}",
    "models_8b": "tests.models_8b --json {file}",
    "sanitizer": "tests.gpu.sanitize --json {file}",
    "initcheck": "tests.initcheck --json {file}",
    "mutants": "tests.mutants.gpu --json {file}",
    "mutants_phases": "tests.mutants.gpu phases --json {file}",
}  # the arguments of `python -m`


def is_done(path: Path, commit: str) -> bool:
    """Whether a file holds a whole result of this commit; one of a changed tree never counts."""
    if not path.exists() or commit == "unknown" or commit.endswith("+dirty"):
        return False
    found = results.read(path)
    return found.is_complete and found.head.commit == commit


def words(name: str, path: Path) -> list[str]:
    """The arguments of a part that writes a file."""
    return shlex.split(PARTS[name].format(file=shlex.quote(str(path))))


def run_part(name: str, path: Path) -> int:
    """Run a part; its exit code, 124 if it took too long. A conformance report is kept as its summary."""
    command = [sys.executable, "-m", *words(name, path)]
    environment = os.environ | {results.COMMIT_VARIABLE: results.commit()}
    try:
        code = subprocess.run(command, env=environment, timeout=LIMIT, check=False).returncode
    except subprocess.TimeoutExpired:
        return 124
    if SUITE in PARTS[name] and path.exists():
        summary.main([str(path)])
    return code


def other_devices(out: Path, parts: list[str], device: str) -> list[str]:
    """Devices that results of other parts came from, but for those that need no GPU."""
    files = [out / f"{name}.json" for name in PARTS if name not in parts]
    found = {results.read(path).head.device for path in files if path.exists()}
    return sorted(found - {device, results.device_name("cpu")})


def main() -> int:
    """Run parts in order and say what came of each; 1 if one failed, 2 if the folder or the machine does not suit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"default: all of {', '.join(PARTS)}")
    parser.add_argument("--out", type=Path, default=OUT, metavar="FOLDER", help="default: %(default)s")
    args = parser.parse_args()
    parts = args.parts or list(PARTS)
    unknown = [name for name in parts if name not in PARTS]
    if unknown:
        parser.error(f"no part is called {', '.join(unknown)}; there are {', '.join(PARTS)}")
    try:
        return run(parts, args.out)
    except AttnBackendsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def run(parts: list[str], out: Path) -> int:
    """Run parts into a folder; 1 if one failed."""
    device, commit = results.device_name("cuda"), results.commit()
    if device == "CUDA":
        raise BackendUnavailableError("gpu-results", ["torch sees no CUDA device"])
    others = other_devices(out, parts, device)
    if others:
        raise BackendUnavailableError(
            "gpu-results",
            [f"{out} holds results of {', '.join(others)}, this is {device}"],
            "Run all parts, or move it.",
        )
    out.mkdir(parents=True, exist_ok=True)
    codes = []
    for name in parts:
        path, start = out / f"{name}.json", time.monotonic()
        if is_done(path, commit):
            print(f"{name}: done before", flush=True)
            continue
        codes.append(run_part(name, path))
        print(f"{name}: exit code {codes[-1]} after {time.monotonic() - start:.0f} s", flush=True)
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
