"""Speculative decoding compared with plain greedy decoding, as one row of a report.

In float32 the two must give the same tokens. In lower precision forwards over one row and over several round
differently, so a run must be consistent instead. The target's verify scores are those of its decode within a budget,
and every token is the best of its verify row within that budget. Where the texts diverge, the two best tokens were too
close to tell apart. What is exact is the target in float32 on the host, on torch kernels that are not under test.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources

import torch
from torch import Tensor

from attn_backends.cache import CacheFormat
from attn_backends.compressed_cache import CompressedFormat
from attn_backends.config.backend_files import backend_options
from attn_backends_reference.config import RunConfig
from attn_backends_reference.eagle.engine import Engine, build_engine
from attn_backends_reference.eagle.prefill_phases import DRAFT_PREFILL, PREFILL
from attn_backends_reference.eagle.requests import Completion
from attn_backends_reference.eagle.scoring import decode_logits, verify_logits
from attn_backends_reference.models.decoder import DraftModel
from attn_backends_reference.run_options import PHASES, PhaseNames

EXACT_DTYPES = ("float32", "float64")
EXACT_BACKENDS = {CacheFormat.KV: "fa3", CacheFormat.LATENT: "fa3", CompressedFormat.COMPRESSED: "dsv4"}

Scores = Callable[[Sequence[int], Sequence[int]], Tensor]
"""From a prompt and tokens after it to the scores of tokens[1:], [len(tokens) - 1, vocab]."""


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt and what followed it, in token ids."""

    prompt: list[int]
    plain: list[int]
    eagle: list[int]


@dataclass(frozen=True, slots=True)
class Row:
    """One run, compared.

    draft: "chain", "tree", "eagle3 chain", "eagle3 tree", "block" or "mtp". path: "graph", "eager", or "mixed" if some
    steps ran each way. tokens_per_cycle: emitted by a cycle on average. divergences: requests whose tokens differ from
    plain decoding. max_gap: largest difference of the two best scores where a request first differs, in float32; 0 if
    none does.
    """

    backend: str
    kernel: str
    model: str
    draft: str
    path: str
    device: str
    dtype: str
    cache_dtype: str
    batch_size: int
    tokens_per_cycle: float
    identical: bool
    consistent: bool
    divergences: int
    max_gap: float

    @property
    def passed(self) -> bool:
        """Whether the run is what its precision promises."""
        return self.identical if self.dtype in EXACT_DTYPES else self.consistent


def demo_prompts() -> list[str]:
    """The frozen prompts: beginnings of Python code, of different lengths."""
    folder = resources.files("attn_backends_reference.eagle") / "prompts"
    return [file.read_text(encoding="utf-8") for file in sorted(folder.iterdir(), key=lambda file: file.name)]


class ExactScores:
    """Scores of targets in float32, computed on the host once for each text: rows of a report share most of theirs."""

    def __init__(self) -> None:
        self._engines: dict[tuple[str, str], Engine] = {}
        self._known: dict[tuple[Engine, tuple[int, ...], tuple[int, ...]], Tensor] = {}

    def of(self, engine: Engine) -> Scores:
        """The scores of an engine's target, over a cache of the same 8-bit floats or of float32."""
        runtime = engine.config.runtime
        key = (engine.config.model.target, runtime.cache_dtype or "float32")
        if key not in self._engines:
            self._engines[key] = build_engine(_on_the_host(engine.config, EXACT_BACKENDS[engine.target.cache_format]))
        exact = self._engines[key]

        def scores(prompt: Sequence[int], tokens: Sequence[int]) -> Tensor:
            text = (exact, tuple(prompt), tuple(tokens))
            if text not in self._known:
                self._known[text] = decode_logits(exact.eagle, prompt, tokens)
            return self._known[text]

        return scores


def run_row(
    engine: Engine,
    prompts: Sequence[str],
    on_progress: Callable[[int], None] | None = None,
    exact: ExactScores | None = None,
) -> Row:
    """Decode prompts plainly, then by EAGLE, all at once, and compare. on_progress gets newly emitted tokens. exact: to
    be shared by the rows of a report.
    """
    config, scores = engine.config, (exact or ExactScores()).of
    encoded = [engine.tokenizer.encode(prompt) for prompt in prompts]
    plain = engine.generate_plain(encoded, config.runtime.max_new_tokens, on_progress)
    eagle = engine.generate(encoded, config.runtime.max_new_tokens, on_progress)
    texts = [Text(*both) for both in zip(encoded, (c.tokens for c in plain), (c.tokens for c in eagle), strict=True)]
    differing = [text for text in texts if text.plain != text.eagle]
    max_gap = max((gap(scores(engine), text) for text in differing), default=0.0)
    is_exact = config.runtime.dtype in EXACT_DTYPES
    consistent = not differing if is_exact else is_consistent(engine, scores(engine), texts, max_gap)
    return Row(
        backend=" + ".join(config.backends.distinct),
        kernel=" + ".join(dict.fromkeys(engine.kernels.values())),
        model=config.model.target,
        draft=_draft(engine),
        path=_path(engine),
        device=str(config.device),
        dtype=config.runtime.dtype,
        cache_dtype=config.runtime.cache_dtype or config.runtime.dtype,
        batch_size=len(prompts),
        tokens_per_cycle=tokens_per_cycle(eagle),
        identical=not differing,
        consistent=consistent,
        divergences=len(differing),
        max_gap=max_gap,
    )


def tokens_per_cycle(completions: Sequence[Completion]) -> float:
    """Tokens that a cycle emitted on average; each request's first token comes from its prefill and is not counted."""
    emitted = sum(len(completion.tokens) - 1 for completion in completions)
    return emitted / max(sum(completion.num_cycles for completion in completions), 1)


def gap(exact: Scores, text: Text) -> float:
    """Difference of the two best exact scores at the first token in which a text differs from plain decoding's."""
    longer = max(text.plain, text.eagle, key=len)
    pairs = enumerate(zip(text.plain, text.eagle, strict=False))
    index = next((i for i, (plain, eagle) in pairs if plain != eagle), min(len(text.plain), len(text.eagle)))
    best = exact(*_scored(text.prompt, longer[: index + 1]))[index].topk(2).values
    return float(best[0] - best[1])


def is_consistent(engine: Engine, exact: Scores, texts: Sequence[Text], max_gap: float) -> bool:
    """Whether a run in low precision is what plain decoding could have given, too.

    exact: its target's scores in float32. The budget is twice what the engine's own decode scores are off, and one
    rounding.
    """
    budget = error = 0.0
    for text in texts:
        scored = _scored(text.prompt, text.eagle)
        decode, verify = (scores(engine.eagle, *scored).double() for scores in (decode_logits, verify_logits))
        true = exact(*scored).double().to(decode.device)
        rounding = torch.finfo(engine.config.dtype).eps * float(true.abs().max())
        budget = max(budget, 2 * (float((decode - true).abs().max()) + rounding))
        chosen = verify.gather(1, torch.tensor(text.eagle, device=verify.device).unsqueeze(1)).squeeze(1)
        error = max(error, float((verify - decode).abs().max()), float((verify.amax(1) - chosen).max()))
    return error <= budget and max_gap <= 2 * budget


def _scored(prompt: list[int], tokens: list[int]) -> tuple[list[int], list[int]]:
    """A prompt and a text for teacher forcing, so that every one of the tokens gets scores."""
    return prompt[:-1], [prompt[-1], *tokens]


def _on_the_host(config: RunConfig, backend: str) -> RunConfig:
    """The run in float32 on the host, eagerly, on the torch kernel of a backend."""
    options = backend_options(backend)
    assert options is not None, "it is one of our own"
    changes = {"dtype": "float32", "path": "eager", "device": "cpu", "planner": "auto"}
    return config.model_copy(
        update={
            "backends": PhaseNames(**dict.fromkeys(PHASES, backend)),
            "kernels": {backend: "torch"},
            "page_size": options.page_size,
            "runtime": config.runtime.model_copy(update=changes),
        }
    )


def _draft(engine: Engine) -> str:
    """The form of what was drafted, and by whom unless by EAGLE."""
    eagle = engine.config.eagle
    assert eagle is not None, "a run without a draft has nothing to compare"
    if eagle.worker != "eagle":
        return eagle.worker
    shape = "chain" if eagle.topk == 1 else "tree"
    first = engine.drafts[0]
    return f"eagle3 {shape}" if isinstance(first, DraftModel) and first.feature_layers else shape


def _path(engine: Engine) -> str:
    """How the steps of the engine's cycles ran, from what they report."""
    cycles = (counts for phase, counts in engine.ran.items() if phase not in (PREFILL, DRAFT_PREFILL))
    paths = {path for counts in cycles for path, number in counts.items() if number}
    return paths.pop() if len(paths) == 1 else "mixed"
