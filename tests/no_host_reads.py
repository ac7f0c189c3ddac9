"""A mode that refuses what reads the device from the host, on any device."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode

from attn_backends import graphs


class NoHostReads(TorchDispatchMode):
    """Refuses what reads the device from the host, as capture does; what goes the other way is no read."""

    def __enter__(self):
        self._conversions = graphs._RefuseHostReads()
        self._conversions.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._conversions.__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        reason = graphs._refusal(func, args, kwargs or {})
        assert not reason or "from Python values" in reason, f"{func}: {reason}"
        return func(*args, **(kwargs or {}))
