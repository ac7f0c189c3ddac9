"""The errors that people meet; each says what was wrong, with the values, and what to do."""

from __future__ import annotations

from collections.abc import Sequence


class AttnBackendsError(Exception):
    """Base of all errors of this library but `spec_metadata.errors.InvalidStepError`."""


class UnsupportedStepError(AttnBackendsError):
    """A backend was given a step, layer or cache outside its declared capabilities; nothing was run or written.

    reasons: a sentence for each unsupported thing. nearest: what would work instead, if anything.
    """

    def __init__(self, what: str, reasons: Sequence[str], nearest: str = "") -> None:
        self.reasons = tuple(reasons)
        self.nearest = nearest
        advice = f" Instead: {nearest}" if nearest else ""
        super().__init__(f"{what}: {'; '.join(reasons)}.{advice}")


class BackendUnavailableError(AttnBackendsError):
    """A backend or kernel can't run here: unknown, not installed, or built for another device."""

    def __init__(self, name: str, reasons: Sequence[str], hint: str = "") -> None:
        self.reasons = tuple(reasons)
        super().__init__(f"{name} can't run here: {'; '.join(reasons)}.{' ' + hint if hint else ''}")


class CaptureError(AttnBackendsError):
    """A region can't be captured into a graph, or a graph can't take a step."""


class MemoryLimitError(AttnBackendsError):
    """A cache, or a model, is larger than the free memory of its device; nothing of it was allocated."""


class PlanError(AttnBackendsError):
    """A backend planned what its own declaration forbids; found in checking mode, before a kernel ran on it."""


class ConfigError(AttnBackendsError):
    """A configuration file or value that can't be used; says which file and key."""


class CheckpointError(AttnBackendsError):
    """A model folder that can't be used: another architecture, missing tensors, or a draft that does not fit."""
