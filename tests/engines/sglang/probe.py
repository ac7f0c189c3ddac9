"""What a test sees of SGLang's engine from inside: patched in before the engine starts, in the process that it forks.

One JSON line a forward of a model runner: its mode, and which layers our backends attended in it, by kind of step. One
a cycle: a request's committed text and root, and the candidates drafted.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Log:
    """A file of JSON lines that several processes append to."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, **entry: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def read(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_text().splitlines()] if self.path.exists() else []


def install(log: Log) -> None:
    """Watch the library's attention and SGLang's steps."""
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.speculative import eagle_worker_v2
    from sglang.srt.speculative.dflash_info import DFlashVerifyInput
    from sglang.srt.speculative.dspark_components.dspark_draft import DraftBlockProposer

    from attn_backends.backend import AttentionBackend

    attended: Counter[str] = Counter()
    _around(AttentionBackend, "forward", functools.partial(_attends, attended))
    _around(ModelRunner, "forward", functools.partial(_forwards, attended, log))
    _around(eagle_worker_v2, "build_eagle_verify_input", functools.partial(_drafts, log))
    _around(DFlashVerifyInput, "prepare_for_verify", functools.partial(blocks, log))
    _around(DraftBlockProposer, "propose", functools.partial(proposals, log))


def _around(owner: Any, name: str, hook: Callable[..., Any]) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        return hook(original, *arguments, **named)

    setattr(owner, name, wrapped)


def _attends(attended: Counter[str], original: Any, backend: Any, q: Any, cache: Any, meta: Any, layer: Any) -> Any:
    attended[f"attn_{backend.name}/{meta.kind}/{layer.id}"] += 1
    return original(backend, q, cache, meta, layer)


def _forwards(
    attended: Counter[str], log: Log, original: Any, runner: Any, batch: Any, *rest: Any, **named: Any
) -> Any:
    mode, lens = batch.forward_mode.name, list(batch.extend_seq_lens_cpu or ())
    layout = getattr(batch.spec_info, "ragged_verify_layout", None)
    widths = [] if layout is None else layout.verify_lens.tolist()
    attended.clear()
    out = original(runner, batch, *rest, **named)
    log.write(
        forward=mode,
        draft=runner.is_draft_worker,
        bs=batch.batch_size,
        rows=len(batch.input_ids),
        lens=lens,
        widths=widths,
        attended=dict(attended),
    )
    return out


def _drafts(
    log: Log, original: Any, batch: Any, draft: Any, parents: Any, chosen: Any, tokens: Any, *rest: Any, **named: Any
) -> Any:
    for i in range(len(batch.reqs)):
        _cycle(log, batch, i, int(draft.bonus_tokens[i]), tokens[i].tolist(), chosen[i].tolist())
    return original(batch, draft, parents, chosen, tokens, *rest, **named)


def blocks(log: Log, original: Any, verify: Any, batch: Any, target: Any, **named: Any) -> Any:
    """Around `DFlashVerifyInput.prepare_for_verify`: one entry a block. A verify of DSPARK's may leave out tokens that
    were drafted.
    """
    is_whole = not target.model_runner.spec_algorithm.is_dspark()
    blocks = verify.draft_token.view(-1, verify.draft_token_num).tolist() if is_whole else []
    for i, (root, *tokens) in enumerate(blocks):
        _cycle(log, batch, i, root, tokens, list(range(len(tokens))))
    return original(verify, batch, target, **named)


def proposals(log: Log, original: Any, proposer: Any, *, batch: Any, **named: Any) -> Any:
    """Around `DraftBlockProposer.propose`: one entry a block."""
    proposal = original(proposer, batch=batch, **named)
    roots, drafted = proposal.draft_block_ids[:, 0].tolist(), proposal.draft_block.draft_tokens.tolist()
    for i, (root, tokens) in enumerate(zip(roots, drafted, strict=True)):
        _cycle(log, batch, i, root, tokens, list(range(len(tokens))))
    return proposal


def _cycle(log: Log, batch: Any, index: int, root: int, tokens: list[int], chosen: list[int]) -> None:
    request = batch.reqs[index]
    text = [*request.origin_input_ids, *request.output_ids][: int(batch.seq_lens[index])]
    log.write(cycle=request.rid, text=[*map(int, text), root], tokens=tokens, chosen=chosen)
