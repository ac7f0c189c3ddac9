"""The draft extend of multi-layer MTP as regions of device work: every module over one window of positions.

The window of a request starts at s = max(L - R, 0). L is its committed length before the verify and R is `num_rerun`.
The window has W = R + A rows, enough for every token accepted since. Token i of a window stands at position s + 1 + i,
so row j of module k takes token j + k. The root, the last known token, has index `root`. The row of that number scores
a draft, which is written after the root and the drafts so far: there the next module's row takes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attn_backends.planning.metadata import Metadata
from attn_backends.runner import PerRequest, PerToken, Phase
from attn_backends_reference.eagle.phases import Accepted, Model
from attn_backends_reference.models.decoder import DraftModel, MultimodalRows
from attn_backends_reference.pieces import Forward
from spec_metadata import Capacity, Step, StepKind, token_positions
from spec_metadata.visibility import query_starts

Modules = Sequence[Model[DraftModel]]


@dataclass(frozen=True, slots=True, eq=False)
class WindowInputs(Accepted):
    """Inputs of a window: the verify's results, and the states and tokens kept before it.

    lens: [bs] int32, L. kept_hidden: [bs, R, H] and kept_tokens: [bs, R] int64, the target's hidden state at positions
    L - R to L - 1 and the token after each; garbage at negative positions.
    """

    lens: PerRequest
    kept_hidden: PerRequest
    kept_tokens: PerRequest

    def window(self, num_steps: int) -> Window:
        """The window from its parts, which together hold positions L - R to L + A - 1."""
        hidden = torch.cat((self.kept_hidden, self.hidden), dim=1)
        tokens = torch.cat((self.kept_tokens, self.tokens), dim=1)
        num_rerun, width = self.kept_tokens.shape[1], tokens.shape[1]
        lens = self.lens.long()
        before_start = (num_rerun - lens).clamp_min(0).unsqueeze(1)  # entries at negative positions
        index = (torch.arange(width, device=lens.device) + before_start).clamp_max(width - 1)
        root = lens.clamp_max(num_rerun) + self.num_accepted - 1
        return Window(
            tokens=torch.nn.functional.pad(tokens.gather(1, index), (0, num_steps)),
            hidden=hidden.gather(1, index.unsqueeze(2).expand_as(hidden)),
            root=root.clamp_min(0),  # nothing is accepted in a padded row
        )


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """The modules' state over a window. tokens: [bs, W + K] int64, drafts included as far as modules ran. hidden:
    [bs, W, H], what the next module takes. root: [bs] int64.
    """

    tokens: PerRequest
    hidden: PerRequest
    root: PerRequest

    def multimodal(self, k: int) -> MultimodalRows | None:
        """Rows that replace the embeddings of module k's tokens: None, because prompts are text."""
        return None


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """The rows of each request of a step. positions, request, offset: [num_tokens] int64, of each row its position, its
    request and its number in that. first, last: [bs] int64, the first and the last row of each request.
    """

    positions: PerToken
    request: PerToken
    offset: PerToken
    first: PerRequest
    last: PerRequest

    @classmethod
    def of(cls, step: Step) -> Rows:
        """The rows of a uniform or packed step."""
        starts = query_starts(step).long()
        row = torch.arange(step.num_tokens, device=step.device)
        request = torch.searchsorted(starts[1:], row, right=True)
        return Rows(token_positions(step), request, row - starts[request], starts[:-1], starts[1:] - 1)


def draft_over(
    modules: Modules,
    forward: Forward,
    rows: Rows,
    tokens: Tensor,
    hidden: Tensor,
    root: Tensor,
    first: int = 0,
    multimodal: Callable[[int], MultimodalRows | None] = lambda k: None,
) -> tuple[Tensor, Tensor]:
    """Run modules over the rows of a step, each on what the one before made of them; returns tokens and hidden then.

    forward: what their attention is made of. tokens: [bs, n] int64 and root: [bs] int64 as in `Window`; a root after
    the rows of its request scores nothing that is read. hidden: [num_tokens, H]. first: number of the first module.
    multimodal: what takes the place of the embeddings of module k's tokens.
    """
    scored = torch.minimum(rows.first + root, rows.last)
    for k, module in enumerate(modules, first):
        taken = tokens[rows.request, rows.offset + k]
        hidden = module.model.forward(taken, hidden, rows.positions, module.attention(forward), multimodal(k))
        draft = module.model.logits(hidden[scored]).argmax(-1)
        tokens = tokens.scatter(1, (root + 1 + k).unsqueeze(1), draft.unsqueeze(1))
    return tokens, hidden


def chain(tokens: Tensor, root: Tensor, num_steps: int) -> Tensor:
    """[bs, num_steps + 1] int64: the root and the drafts after it."""
    nodes = torch.arange(num_steps + 1, device=root.device)
    return tokens.gather(1, root.unsqueeze(1) + nodes)


def window_phase(modules: Modules, capacity: Capacity) -> Phase[WindowInputs, Window]:
    """Make the window of a verify's result, and run the first modules over it."""
    hidden_size, device = modules[0].model.hidden_size, modules[0].model.device

    def region(meta: Metadata, given: WindowInputs) -> Window:
        return _advance(modules, meta, given.window(capacity.num_steps), 0)

    def safe_inputs(bs: int) -> WindowInputs:
        accepted, kept = (bs, capacity.max_accepted), (bs, capacity.num_rerun)
        dtype = modules[0].model.dtype
        return WindowInputs(
            num_accepted=torch.zeros(bs, dtype=torch.int32, device=device),
            tokens=torch.zeros(accepted, dtype=torch.int64, device=device),
            hidden=torch.zeros(*accepted, hidden_size, dtype=dtype, device=device),
            lens=torch.zeros(bs, dtype=torch.int32, device=device),
            kept_hidden=torch.zeros(*kept, hidden_size, dtype=dtype, device=device),
            kept_tokens=torch.zeros(kept, dtype=torch.int64, device=device),
        )

    return Phase("draft_extend", region, safe_inputs, Window, lambda bs: capacity.bucket(StepKind.DRAFT_EXTEND, bs))


def module_phase(module: Model[DraftModel], k: int, capacity: Capacity) -> Phase[Window, Window]:
    """Run module k over the window that the modules before it left."""
    hidden_size, device = module.model.hidden_size, module.model.device

    def region(meta: Metadata, window: Window) -> Window:
        return _advance([module], meta, window, k)

    def safe_inputs(bs: int) -> Window:
        width = capacity.extend_width
        return Window(
            tokens=torch.zeros(bs, width + capacity.num_steps, dtype=torch.int64, device=device),
            hidden=torch.zeros(bs, width, hidden_size, dtype=module.model.dtype, device=device),
            root=torch.zeros(bs, dtype=torch.int64, device=device),
        )

    name = f"draft_extend_{k}"
    return Phase(name, region, safe_inputs, Window, lambda bs: capacity.bucket(StepKind.DRAFT_EXTEND, bs))


def _advance(modules: Modules, meta: Metadata, window: Window, first: int) -> Window:
    rows, hidden = Rows.of(meta.step), window.hidden.flatten(0, 1)
    tokens, hidden = draft_over(
        modules, meta.at(), rows, window.tokens, hidden, window.root, first, multimodal=window.multimodal
    )
    return replace(window, tokens=tokens, hidden=hidden.view_as(window.hidden))
