"""The tables of docs/heads.md: ``python -m tests.head_table`` writes them, `tests/test_head_table.py` compares them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from attn_backends.errors import AttnBackendsError
from attn_backends.registry import get_backend
from attn_backends_reference.eagle.options import PhaseBackends, WorkerOptions
from attn_backends_reference.eagle.parallel import ParallelWorker
from attn_backends_reference.eagle.serving import serve
from attn_backends_reference.eagle.worker import EagleWorker, PlainWorker
from attn_backends_reference.models import TargetModel, load_draft, load_parallel
from attn_backends_reference.models.block import load_block
from attn_backends_reference.models.families import served_families
from attn_backends_reference.models.peagle import PEagleModel
from spec_metadata import CacheGeometry, Capacity
from tests import reference_models as rm
from tests.block_formats import BLOCKS, DSPARKS
from tests.generated_tables import page_with
from tests.head_catalogue import FORMATS
from tests.head_formats import Format, write
from tests.head_judges import SGLANG, VLLM
from tests.head_names import HEADS, Named
from tests.head_runs import CLOSE, TEXT, DenseAttention, expected_log_probs, log_probs, oracle_of, target_of
from tests.peagle_formats import PEAGLES
from tests.serving_scenes import PHASES

BLOCK_FORMATS = {"DFlash": BLOCKS, "DSpark": DSPARKS}
PARALLEL = "P-EAGLE"
RUN = FORMATS | {PARALLEL: PEAGLES["speculators P-EAGLE"]}
"""The formats whose heads run with a target of their own here."""
PAGE = Path(__file__).parent.parent / "docs" / "heads.md"


def format_table() -> list[str]:
    """The lines of the table of formats."""
    titles = "format | heads of | source | loads | logits equal an independent forward's | drafts in vLLM | in SGLang"
    lines = [f"| {titles} |", "|---|---|---|---|---|---|---|"]
    for name, form in FORMATS.items():
        loads, equal = (said(value) for value in format_results(name))
        judged = f"{VLLM[name].words} | {SGLANG[name].words}"
        lines.append(f"| {name} | {form.catalogue} | {form.source} | {loads} | {equal} | {judged} |")
    return lines


def head_table() -> list[str]:
    """The lines of the table of named heads."""
    lines = ["| head | format | target | format loads | target and head run |", "|---|---|---|---|---|"]
    for head, loads, ran in head_results():
        why = f": {head.why_not}" * bool(head.why_not)
        lines.append(f"| {head.name} | {head.format} | `{head.architecture}` | {said(loads)} | {said(ran)}{why} |")
    return lines


def said(value: bool) -> str:
    """A cell."""
    return "yes" if value else "no"


@torch.no_grad()
def format_results(name: str) -> tuple[bool, bool]:
    """Whether a folder of a format loads, and whether its logits are an independent forward's."""
    form = FORMATS[name]
    with TemporaryDirectory() as folder:
        oracle = oracle_of(form, write(form, Path(folder)))
        try:
            draft = load_draft(folder, target_of(form))
        except AttnBackendsError:
            return False, False
        found = log_probs(draft, oracle.features(TEXT.tolist()), DenseAttention(draft))
    return True, torch.allclose(found, expected_log_probs(oracle), **CLOSE)


def head_results() -> Iterator[tuple[Named, bool, bool]]:
    """Each named head, whether its format loads, and whether a target of its architecture runs with such a head."""
    loads = {name: format_results(name)[0] for name in FORMATS} | {
        name: all_load(forms) for name, forms in BLOCK_FORMATS.items()
    }
    loads[PARALLEL] = all_load(PEAGLES, load_parallel)
    tiny = {
        rm.family_of(name).architecture: name
        for name in ("gqa", "qwen2", "qwen3", "qwen3_moe", "mistral", "mixtral", "olmoe", "gpt_oss", "mla", "mla_glm")
    }
    tiny = {
        family.architecture: tiny[family.architecture] for family in served_families() if family.architecture in tiny
    }
    ran: dict[tuple[str, str], bool] = {}
    for head in HEADS:
        pair = (head.format, head.architecture)
        if pair not in ran:
            fits = head.architecture in tiny and head.format in RUN and loads[head.format]
            ran[pair] = fits and runs(head.format, tiny[head.architecture])
        yield head, loads.get(head.format, False), ran[pair]


def all_load(formats: Mapping[str, Format], load: Callable[[str, TargetModel], object] = load_block) -> bool:
    """Whether folders of published block drafts load."""
    for form in formats.values():
        with TemporaryDirectory() as folder:
            write(form, Path(folder))
            try:
                load(folder, target_of(form))
            except AttnBackendsError:
                return False
    return True


def runs(format: str, tiny: str) -> bool:
    """Whether a tiny target emits by a head of a format what it emits plainly."""
    target = rm.served_target(tiny, tiny_target(tiny))
    with TemporaryDirectory() as folder:
        write(RUN[format], Path(folder))
        draft = load_parallel(folder, target) if format == PARALLEL else load_draft(folder, target)
    shape = Capacity(2, 40, 4, 1, 3, 4, num_extended=6) if format == PARALLEL else Capacity(2, 40, 4, 3, 3, 10)
    capacity, prompts = shape, [TEXT[:11].tolist(), TEXT[20:24].tolist()]
    geometry = CacheGeometry(1 + capacity.max_bs * capacity.max_pages, 4)
    backend = get_backend("fa3")(capacity, geometry, kernel="torch")
    place = (PhaseBackends(**dict.fromkeys(PHASES, backend)), capacity, geometry, WorkerOptions(chunk=5))
    worker = (
        ParallelWorker(target, draft, *place) if isinstance(draft, PEagleModel) else EagleWorker(target, draft, *place)
    )
    drafted, plain = (
        [done.tokens for done in serve(each, prompts, 10)] for each in (worker, PlainWorker(target, *place))
    )
    return drafted == plain


def tiny_target(name: str) -> PreTrainedModel:
    """A random target of a family, of seven layers."""
    changes = {"num_hidden_layers": 7} | ({"first_k_dense_replace": 7} if name.startswith("mla") else {})
    model = AutoModelForCausalLM.from_config(rm.tiny_config(name, **changes))
    rm.randomize(model, 0)
    return model.eval().requires_grad_(False)


if __name__ == "__main__":
    made = {"formats": format_table(), "heads": head_table()}
    PAGE.write_text(page_with(made, PAGE.read_text(encoding="utf-8")), encoding="utf-8")
