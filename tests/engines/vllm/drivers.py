"""Drivers of vLLM's backends with a bug each, in the driver or in the backend behind it. `BUGS` has them by bug and
backend. Each is a class of this module, because cases run in another process.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from attn_backends.cache import PagedCache
from attn_backends.conformance import Row, Subject, selected_cases
from attn_backends.conformance.foreign.blame import run_foreign_case
from attn_backends.conformance.foreign.driver import ForeignBackend, ForeignStep
from attn_backends.conformance.foreign.vllm.backends import (
    CPUAttn,
    FlashAttn,
    FlashAttnMLA,
    FlashInferMLA,
    FlashMLA,
    TritonAttn,
    TritonMLA,
    VLLMBackend,
)
from spec_metadata import Step


def rows_of(backend: type[ForeignBackend], checks: tuple[str, ...], kind: str | None = None) -> list[Row]:
    """The first case of each check, step kind and path. kind: of them one alone."""
    subject = Subject(backend, "stand_in")
    cases = [case for check in checks for case in selected_cases(subject, check) if kind in (None, case.kind)]
    first = {(case.check, case.kind, case.path): case for case in reversed(cases)}
    return [run_foreign_case(subject, case) for case in first.values()]


class DriverCountsOneLess(VLLMBackend):
    """The driver's mistake: lengths are one too short."""

    def plan_eagerly(self, step: Step) -> ForeignStep:
        assert step.seq_lens_cpu is not None
        return super().plan_eagerly(replace(step, seq_lens_cpu=tuple(n - 1 for n in step.seq_lens_cpu)))


class DriverTurnsPagesRound(VLLMBackend):
    """The driver's mistake: every page is brought to the place of the next."""

    def bring_in(self, cache: PagedCache) -> None:
        for ours, theirs in self.pairs(cache):
            theirs.copy_(ours.roll(1, 0))


class BrokenBackend(VLLMBackend):
    """Another class in place of vLLM's. breaks: what its name has in it. broken: vLLM's -> one of it with a bug."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        parts, module = self.parts, vars(self.engine.module)
        changed = {name: self.broken(module[name]) for name in (parts.builder, parts.impl) if self.breaks in name}
        assert changed
        self.engine.module = SimpleNamespace(**{**module, **changed})

    breaks = "Builder"

    @staticmethod
    def broken(right: Any) -> Any:
        raise NotImplementedError


class DecodesOneKeyLess(BrokenBackend):
    """The backend's bug: an eager decode does not see its own token."""

    @staticmethod
    def broken(right: Any) -> Any:
        class Builder(right):
            captures = False

            def build(self, common_prefix_len: int, common_attn_metadata: Any, **options: Any) -> Any:
                common = common_attn_metadata
                if common.max_query_len == 1 and not self.captures:
                    common = common.replace(seq_lens=common.seq_lens - 1)
                return super().build(common_prefix_len, common, **options)

            def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
                self.captures = True
                built = super().build_for_cudagraph_capture(common_attn_metadata)
                self.captures = False
                return built

        return Builder


class HoldsWhatWasCaptured(BrokenBackend):
    """The backend's bug: a verify's graph reads a copy of the lengths that it was captured with."""

    @staticmethod
    def broken(right: Any) -> Any:
        class Builder(right):
            def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
                copied = common_attn_metadata.seq_lens.clone()
                return super().build_for_cudagraph_capture(common_attn_metadata.replace(seq_lens=copied))

        return Builder


class VerifiesOthers(BrokenBackend):
    """The backend's bug: an eager verify has the block tables in another order."""

    @staticmethod
    def broken(right: Any) -> Any:
        class Builder(right):
            def build(self, common_prefix_len: int, common_attn_metadata: Any, **options: Any) -> Any:
                common = common_attn_metadata
                if common.max_query_len > 1:
                    common = common.replace(block_table_tensor=common.block_table_tensor.flip(0))
                return super().build(common_prefix_len, common, **options)

        return Builder


class StoresValuesElsewhere(BrokenBackend, FlashAttn):
    """The backend's bug: values go to the place of the next row's."""

    breaks = "Impl"

    @staticmethod
    def broken(right: Any) -> Any:
        class Impl(right):
            def do_kv_cache_update(self, layer: Any, key: Any, value: Any, *others: Any) -> None:
                super().do_kv_cache_update(layer, key, value.roll(1, 0), *others)

        return Impl


DRIVEN = (FlashMLA, FlashAttnMLA, TritonMLA, FlashInferMLA, TritonAttn, FlashAttn, CPUAttn)
BUGS: dict[tuple[str, str], type[VLLMBackend]] = {}
for _bug in (DriverCountsOneLess, DriverTurnsPagesRound, DecodesOneKeyLess, HoldsWhatWasCaptured, VerifiesOthers):
    for _driver in DRIVEN:
        _name = _bug.__name__ + _driver.__name__
        BUGS[_bug.__name__, _driver.__name__] = globals()[_name] = type(
            _name, (_bug, _driver), {"__module__": __name__}
        )
