"""Drivers of SGLang's FlashInfer-MLA with a bug each, in the driver or in the backend behind it."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import Any

from attn_backends.cache import PagedCache, PagedLatent
from attn_backends.conformance.foreign.driver import ForeignStep
from attn_backends.conformance.foreign.sglang.backends import FA3, FlashInferMLA
from spec_metadata import Step


class DriverCountsOneLess(FlashInferMLA):
    """The driver's mistake: lengths are one too short."""

    def plan_eagerly(self, step: Step) -> ForeignStep:
        assert step.seq_lens_cpu is not None
        return super().plan_eagerly(replace(step, seq_lens_cpu=tuple(n - 1 for n in step.seq_lens_cpu)))


class DriverTurnsPagesRound(FlashInferMLA):
    """The driver's mistake: every page is brought to the place of the next."""

    def bring_in(self, cache: PagedCache) -> None:
        assert isinstance(cache, PagedLatent)
        self.engine.pages.copy_(cache.latent.roll(1, 0))


class DecodesOneKeyLess(FlashInferMLA):
    """The backend's bug: an eager decode does not see its own token."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        module = self.engine.api.attention_module("flashinfer_mla_backend")
        right = module.FlashInferMLAAttnBackend

        class Backend(right.__base__ if right.__name__ == "Backend" else right):
            def init_forward_metadata(self, batch: Any) -> None:
                if batch.forward_mode.is_decode():
                    batch = copy(batch)
                    batch.seq_lens, batch.seq_lens_sum = batch.seq_lens - 1, batch.seq_lens_sum - batch.batch_size
                super().init_forward_metadata(batch)

        module.FlashInferMLAAttnBackend = Backend


class VerifiesWhatWasCaptured(FlashInferMLA):
    """The backend's bug: a verify is not planned again before a replay."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        module = self.engine.api.attention_module("flashinfer_mla_backend")
        right = module.FlashInferMLAAttnBackend

        class Backend(right.__base__ if right.__name__ == "Backend" else right):
            def init_forward_metadata_out_graph(self, batch: Any, in_capture: bool = False) -> None:
                if in_capture or not batch.forward_mode.is_target_verify():
                    super().init_forward_metadata_out_graph(batch, in_capture)

        module.FlashInferMLAAttnBackend = Backend


class DenseSlices(FA3):
    """SGLang's FA3 with dense slots for each forward of a draft."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        api = self.engine.api
        slices = api.per_step_draft_out_cache_loc
        api.per_step_draft_out_cache_loc = lambda *given: slices(*given).contiguous()
