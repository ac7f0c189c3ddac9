"""Drivers of SGLang's backends with a bug each, in the driver or in the backend behind it.

`BUGS` has them by bug and backend. Each is a class of this module, because a case runs in a process of its own.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import Any

from attn_backends.cache import PagedCache
from attn_backends.conformance.foreign.driver import ForeignStep
from attn_backends.conformance.foreign.sglang.backends import FA3, TRTLLMMLA, FlashInferMLA, SGLangBackend, TritonMLA
from attn_backends.conformance.foreign.sglang.dsv4 import DeepSeekV4
from spec_metadata import Step


class DriverCountsOneLess(SGLangBackend):
    """The driver's mistake: lengths are one too short."""

    def plan_eagerly(self, step: Step) -> ForeignStep:
        assert step.seq_lens_cpu is not None
        return super().plan_eagerly(replace(step, seq_lens_cpu=tuple(n - 1 for n in step.seq_lens_cpu)))


class DriverTurnsPagesRound(SGLangBackend):
    """The driver's mistake: every page is brought to the place of the next."""

    def bring_in(self, cache: PagedCache) -> None:
        self.engine.pages.copy_(self.pages_of(cache).roll(1, 0))


class BrokenBackend(SGLangBackend):
    """Another backend in SGLang's place. broken: SGLang's class -> one of it with a bug."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        module = self.engine.api.attention_module(self.parts.module)
        right = getattr(module, self.parts.backend)
        setattr(module, self.parts.backend, self.broken(getattr(right, "right", right)))

    @staticmethod
    def broken(right: Any) -> Any:
        raise NotImplementedError


class DecodesOneKeyLess(BrokenBackend):
    """The backend's bug: an eager decode does not see its own token."""

    @staticmethod
    def broken(right: Any) -> Any:
        class Backend(right):
            def init_forward_metadata(self, batch: Any) -> None:
                if batch.forward_mode.is_decode():
                    batch = copy(batch)
                    batch.seq_lens, batch.seq_lens_sum = batch.seq_lens - 1, batch.seq_lens_sum - batch.batch_size
                    batch.seq_lens_cpu = batch.seq_lens_cpu - 1
                super().init_forward_metadata(batch)

        Backend.right = right
        return Backend


class VerifiesWhatWasCaptured(BrokenBackend):
    """The backend's bug: a verify is not planned again before a replay."""

    @staticmethod
    def broken(right: Any) -> Any:
        class Backend(right):
            def init_forward_metadata_out_graph(self, batch: Any, in_capture: bool = False) -> None:
                if in_capture or not batch.forward_mode.is_target_verify():
                    super().init_forward_metadata_out_graph(batch, in_capture)

        Backend.right = right
        return Backend


class DenseSlices(FA3):
    """SGLang's FA3 with dense slots for each forward of a draft."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        api = self.engine.api
        slices = api.per_step_draft_out_cache_loc
        api.per_step_draft_out_cache_loc = lambda *given: slices(*given).contiguous()


class MendedDrafts(BrokenBackend, DeepSeekV4):
    """SGLang's DeepSeek-V4 with lengths and slots of each forward of a draft."""

    @staticmethod
    def broken(right: Any) -> Any:
        class Backend(right):
            def init_forward_metadata_in_graph(self, batch: Any) -> None:
                if batch.forward_mode.is_decode() and self.speculative_num_steps > 1:
                    flat, forward = batch.out_cache_loc, self.speculative_step_id
                    slots = flat.view(batch.batch_size, -1)[:, forward].contiguous()
                    lens = batch.seq_lens[: batch.batch_size] + forward + 1
                    self.forward_metadata = replace(self.forward_metadata, out_cache_loc=slots, seq_lens=lens)
                super().init_forward_metadata_in_graph(batch)

        Backend.right = right
        return Backend


DRIVEN = (FlashInferMLA, TRTLLMMLA, FA3, TritonMLA, DeepSeekV4)
BUGS: dict[tuple[str, str], type[SGLangBackend]] = {}
for _bug in (DriverCountsOneLess, DriverTurnsPagesRound, DecodesOneKeyLess, VerifiesWhatWasCaptured):
    for _driver in DRIVEN:
        _name = _bug.__name__ + _driver.__name__
        BUGS[_bug.__name__, _driver.__name__] = globals()[_name] = type(
            _name, (_bug, _driver), {"__module__": __name__}
        )
