"""The library's trained models in the forms that SGLang loads.

`mla`: the target, and MTP module 0 as a NextN draft, as `attn-backends export` writes them. The others are as they are
shipped.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from attn_backends_reference.models.exports import export

ROOT = Path(__file__).parents[3]
CHECKPOINTS = ROOT / "reference" / "attn_backends_reference" / "models" / "checkpoints"


def write_all(folder: Path, min_hidden: int = 0) -> None:
    """gqa_target, gqa_eagle3, mla_target and mla_nextn. min_hidden: the smallest hidden size of `mla`."""
    for name in ("target", "eagle3"):
        shutil.copytree(CHECKPOINTS / "gqa" / name, folder / f"gqa_{name}")
    mla = CHECKPOINTS / "mla"
    written = export(mla / "target", mla / "mtp", "sglang", folder / "mla", min_hidden=min_hidden)
    for path, name in zip(written, ("mla_target", "mla_nextn"), strict=True):
        path.rename(folder / name)
