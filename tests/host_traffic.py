"""What a worker's host would wait for and copy if the CPU were a device, in place of the profiler of a GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from attn_backends import graphs
from attn_backends_reference.eagle import launches
from benchmarks.timing import Work
from tests.counts import Counts


class HostTraffic(TorchDispatchMode):
    """Counts reads of the device as waits, tensors made from Python values as sent, and what `HostCopy` does.

    probe: in place of `count_on_cuda`.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self._counts = counts = Counter[str]()

        class Copy(launches.HostCopy):
            def __init__(self, *tensors: Tensor) -> None:
                counts["to_host"] += len(tensors)
                super().__init__(*tensors)

            def read(self) -> list[list]:
                counts["syncs"] += 1
                return super().read()

        patch.setattr(launches, "HostCopy", Copy)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        reason = graphs._refusal(func, args, kwargs or {})
        if reason:
            self._counts["to_device" if "from Python values" in reason else "syncs"] += 1
        return func(*args, **(kwargs or {}))

    def probe(self, works: Sequence[Work]) -> list[Counts]:
        """Counts of each; no times and no launches."""
        return [self._of(work) for work in works]

    def _of(self, work: Work) -> Counts:
        work.run()
        call = work.ready()
        self._counts.clear()
        with self:
            call()
            work.in_graph()
        return Counts(0.0, 0, 0, **{name: self._counts[name] for name in ("syncs", "to_device", "to_host")})
