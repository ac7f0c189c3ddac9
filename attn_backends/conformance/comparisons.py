"""Comparisons that say which field and row of a result is the first to be wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from attn_backends.conformance import oracle
from attn_backends.conformance.catalogue import CheckFailure, Measured
from attn_backends.conformance.inputs import ForwardInputs
from attn_backends.conformance.scenes import Scene
from attn_backends.layer import AttentionOutput
from spec_metadata import InvalidStepError
from spec_metadata.buffers import Buffers, out_of_range

SHOWN = 4  # elements of a row in a message


def compare_outputs(scene: Scene, inputs: list[ForwardInputs], outputs: Sequence[AttentionOutput]) -> Measured:
    """Every real row's output and LSE of all forwards against the oracle, within budgets."""
    out, lse = expectations(scene, inputs)
    found = [out.compare([o.out for o in outputs])]
    if returns_lse(scene):
        found.append(lse.compare([o.lse for o in outputs]))
    return nearest(found)


def returns_lse(scene: Scene) -> bool:
    """Whether the kernel declares a log-sum-exp for the scene's step kind and layer."""
    kind, world = scene.batch.kind, scene.world
    in_parts = scene.is_tree or (scene.drafts and world.backend.prefix_only)
    return kind in world.backend.choices and world.returns_lse(kind, world.layer, in_parts=in_parts)


class Expectation:
    """Expected values of a field in all forwards. exact: of each forward, float64. budget: largest error of an element,
    the oracle's and `allowance` more.
    """

    def __init__(
        self, field: str, exact: list[Tensor], rounded: list[Tensor], dtype: torch.dtype, allowance: float = 0.0
    ) -> None:
        self.field, self.exact, self.dtype = field, exact, dtype
        self.budget = oracle.budget(torch.cat(exact), torch.cat(rounded), dtype) + allowance

    def compare(self, got: Sequence[Tensor]) -> Measured:
        """Hold every forward's leading rows against it."""
        worst = 0.0
        for forward, (exact, actual) in enumerate(zip(self.exact, got, strict=True)):
            field = f"{self.field} of forward {forward}"
            if actual.dtype is not self.dtype:
                raise CheckFailure(field, "another type", expected=str(self.dtype), got=str(actual.dtype))
            if actual.shape[0] < exact.shape[0] or actual.shape[1:] != exact.shape[1:]:
                raise CheckFailure(field, "another shape", expected=str(list(exact.shape)), got=str(list(actual.shape)))
            worst = max(worst, largest_error(field, actual[: exact.shape[0]], exact, self.budget))
        return Measured(worst, self.budget)


def expectations(scene: Scene, inputs: list[ForwardInputs]) -> tuple[Expectation, Expectation]:
    """Expected outputs and LSEs of a scene."""
    dtype = scene.world.setup.dtype
    single = torch.float32 if dtype is torch.float64 else dtype
    forwards = range(scene.num_forwards)
    exact = [scene.expected_output(inputs, forward) for forward in forwards]
    rounded = [scene.expected_output(inputs, forward, single) for forward in forwards]
    lse_dtype = torch.float64 if dtype is torch.float64 else torch.float32
    allowance = _largest_truncation(scene, inputs) if dtype.itemsize == 2 else 0.0
    return (
        Expectation("output", [out for out, _ in exact], [out for out, _ in rounded], dtype),
        Expectation("LSE", [lse for _, lse in exact], [lse for _, lse in rounded], lse_dtype, allowance),
    )


def _largest_truncation(scene: Scene, inputs: list[ForwardInputs]) -> float:
    """What any score of a scene may lose on tensor cores."""
    layer = scene.world.layer
    queries = [float(given.q.double().norm(dim=-1).max()) for given in inputs if given.q.numel()]
    return oracle.truncation(layer.head_dim, layer.scale * max(queries, default=0.0) * scene.longest_key())


def largest_error(field: str, actual: Tensor, exact: Tensor, budget: float) -> float:
    """The largest error; raises with the first row over the budget. NaN is over it."""
    actual, exact = actual.cpu().double(), exact.double()
    error = (actual - exact).abs()
    if error.numel() == 0:
        return 0.0
    wrong = (~(error <= budget)).flatten(1).any(dim=1).nonzero().flatten().tolist()
    if wrong:
        row = wrong[0]
        most = float(error[row].max())
        here = "is NaN" if actual[row].isnan().any() else f"by {most:.3g}, over the budget of {budget:.3g}"
        message = f"{len(wrong)} of {len(error)} rows are wrong; here {here}"
        raise CheckFailure(field, message, row, _values(exact[row]), _values(actual[row]))
    return float(error.max())


def nearest(found: Sequence[Measured]) -> Measured:
    """The one that came nearest to its budget."""
    return max(found, key=lambda m: (m.max_err or 0.0) / m.budget if m.budget else 0.0, default=Measured())


def compare_memory(scene: Scene, before: Tensor, forwards: int | None = None, *, padded: bool = False) -> None:
    """Exactly the owned slots changed, to exactly the right bytes. padded: padding may write the reserved page.

    Outputs are compared after it: they are of the entries that it finds right (`CompressedScene.settle`).
    """
    actual, expected = scene.world.memory, scene.expected_memory(before, forwards)
    if padded:
        reserved = scene.world.geometry.reserved_page
        expected[reserved] = actual[reserved]
    scene.settle(actual, expected)
    theirs = scene.compared(expected)
    for name, ours in scene.compared(actual).items():
        try:
            compare_identical(name, ours, theirs[name])
        except CheckFailure as failure:
            if failure.row is None:
                raise
            message = scene.place_of(name, failure.row)
            raise CheckFailure(name, message, failure.row, failure.expected, failure.got) from None


def compare_identical(field: str, got: Tensor, expected: Tensor) -> None:
    """Same shape, type and bytes."""
    if (got.shape, got.dtype) != (expected.shape, expected.dtype):
        what = [f"{list(x.shape)} {x.dtype}" for x in (expected, got)]
        raise CheckFailure(field, "another shape or type", expected=what[0], got=what[1])
    if got.numel() == 0:
        return
    ours, theirs = (x.contiguous().view(torch.uint8).reshape(x.shape[0] if x.ndim else 1, -1) for x in (got, expected))
    if torch.equal(ours, theirs):
        return
    wrong = (ours != theirs).any(dim=1).nonzero().flatten().tolist()
    row = wrong[0]
    one, two = (x[row] if x.ndim else x for x in (expected, got))
    message = f"{len(wrong)} of {len(ours)} rows differ"
    raise CheckFailure(field, message, row, _values(one), _values(two))


def _values(row: Tensor) -> str:
    flat = (row.float() if row.dtype.itemsize == 1 and row.is_floating_point() else row).flatten().tolist()
    shown = ", ".join(f"{x:.6g}" if isinstance(x, float) else str(x) for x in flat[:SHOWN])
    return f"[{shown}{', …' if len(flat) > SHOWN else ''}]"


def compare_ranges(scene: Scene, buffers: Buffers) -> None:
    """Every value of a plan's buffers lies in its declared range."""
    if problems := out_of_range(scene.world.backend.buffers(scene.batch.kind), buffers):
        raise CheckFailure(problems[0].split()[0], f"outside its declared range: {'; '.join(problems)}")


def why_invalid(field: str, call: Callable[[], object]) -> str:
    """The text of the `InvalidStepError` that a call must raise."""
    try:
        call()
    except InvalidStepError as refusal:
        return str(refusal)
    raise CheckFailure(field, "what is no valid one is taken")
