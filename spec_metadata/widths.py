"""Numbers of rows of a ragged step's requests: the rule that keeps them within bounds, on the device.

The first row always stays. Of the others it is the least confident rows that go, and with a row all that are below it:

- A worker that knows how confident its draft is cuts first (`confident_widths`), before it makes the step.
- A step knows widths alone (`BoundedQuery`). It takes the deeper row for the less confident one, as a path's
  probability falls with its depth, and of equally deep ones that of the later request (`fit_widths`). Widths that fit
  are left as they are.
"""

from __future__ import annotations

import math
from numbers import Real

import torch
from torch import Tensor

from spec_metadata.errors import InvalidStepError, describe
from spec_metadata.query import BoundedQuery, check_room


def fit_widths(query: BoundedQuery, real: Tensor) -> Tensor:
    """[bs] int64: the widths of a query, 1 to `query.width` each, of requests that are not real 0, cut until no more
    than `query.num_tokens` rows are left. Device only, fixed shapes.

    real: [bs] bool. The deepest rows go first, of equally deep ones those of the later requests.
    """
    room = query.num_tokens
    wanted = torch.where(real, query.widths.long().clamp(1, query.width), 0)
    depths = torch.arange(1, query.width + 1, device=wanted.device)
    through = torch.minimum(wanted.unsqueeze(1), depths).sum(0)  # rows up to each depth
    whole = (through <= room).sum()
    kept = torch.minimum(wanted, whole)
    further = wanted > whole
    return kept + (further & (further.cumsum(0) <= room - kept.sum()))


def confident_widths(scores: Tensor, threshold: float, num_tokens: int, real: Tensor) -> Tensor:
    """[bs] int32: how many rows of each chain to verify, by what its draft thinks of them. Device only, fixed shapes.

    scores: [bs, width - 1], the log-probability that the draft gives to the path up to each drafted token, which never
    rises with depth; NaN counts as impossible. threshold: least probability of a path, 0 for any. num_tokens: rows of
    all requests, at least bs; the least probable go, of equally probable ones the deeper, then those of later requests.
    real: [bs] bool; requests that are not real have 1 row, which is not counted. Raises `InvalidStepError` for scores
    that are no matrix, a threshold that is no probability, and a bound that does not hold the roots.
    """
    if not isinstance(scores, Tensor) or scores.ndim != 2 or not scores.is_floating_point():
        raise InvalidStepError(f"scores must be [bs, width - 1] log-probabilities, got {describe(scores)}")
    check_threshold(threshold)
    bs, num_drafted = scores.shape
    check_room(num_tokens, bs)
    scores = scores.float().nan_to_num(nan=torch.finfo(torch.float32).min)  # before what does not stay
    least = math.log(threshold) if threshold else float("-inf")
    stays = (scores >= least) & real.unsqueeze(1)
    by_depth = torch.where(stays, scores, float("-inf")).t().reshape(-1)
    order = by_depth.sort(descending=True, stable=True).indices
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    kept = (place.view(num_drafted, bs).t() < num_tokens - real.sum()) & stays
    return 1 + kept.sum(1, dtype=torch.int32)


def check_threshold(threshold: float) -> None:
    """Refuse a threshold that is no probability."""
    if not isinstance(threshold, Real) or not 0 <= threshold <= 1:
        raise InvalidStepError(f"threshold must be a probability in [0, 1] (0 cuts nothing), got {threshold!r}")


def check_widths(query: BoundedQuery, num_real: int) -> None:
    """Refuse widths of real requests that `fit_widths` would cut. Reads the device back: for checking mode."""
    widths = query.widths[:num_real].tolist()
    for request, width in enumerate(widths):
        if not 1 <= width <= query.width:
            raise InvalidStepError(
                f"request {request} has a width of {width}; a ragged step has 1 to {query.width} rows per request"
            )
    if sum(widths) > query.num_tokens:
        raise InvalidStepError(
            f"widths {widths} are {sum(widths)} rows, over the bound of {query.num_tokens}. Cut them (spec_metadata."
            "confident_widths), or promise more rows"
        )
