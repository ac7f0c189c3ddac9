"""`export`: an MTP draft and its target as an engine loads them."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from attn_backends.cli import Command
from attn_backends.cli.consoles import output_console, progress
from attn_backends_reference.models import EMBEDDED_DRAFTS, EMBEDDED_TARGETS, exports, folders


def run(args: argparse.Namespace) -> int:
    """Write both folders and print where they are."""
    target, draft = folders.find(args.folder, EMBEDDED_TARGETS), folders.find(args.draft, EMBEDDED_DRAFTS)
    with progress(f"writing {target.name} and {draft.name} for {args.to}", "folders"):
        written = exports.export(target, draft, args.to, args.out)
    names = dict(zip(("target", "draft"), map(str, written), strict=True))
    if args.json:
        output_console().print_json(json.dumps(names))
    else:
        for name, path in names.items():
            output_console().print(f"{name}: {path}", markup=False, soft_wrap=True)
    return 0


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="FOLDER", help="a target's folder, or an embedded one's name")
    parser.add_argument(
        "--draft", required=True, metavar="FOLDER", help="its MTP draft's folder, or an embedded one's name"
    )
    parser.add_argument("--to", required=True, choices=exports.ENGINES, help="the engine that is to load them")
    parser.add_argument("--out", required=True, type=Path, metavar="FOLDER", help="where target and draft are written")
    parser.add_argument("--json", action="store_true", help="print JSON")


COMMAND = Command(
    "Write an MTP draft and its target, of DeepSeek's architecture, as SGLang or vLLM loads them: the same models with "
    "other keys and tensors.",
    _add_arguments,
    run,
    "attn-backends export mla --draft mla-mtp --to sglang --out exported",
)
