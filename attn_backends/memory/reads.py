"""Ends of the reads of a memory: an event of each stream. Its next writer waits for all of them."""

from __future__ import annotations

import torch

from attn_backends.errors import CaptureError
from attn_backends.graphs import is_capturing


class Reads:
    """Events after the last reads of a device's memory, one for each stream. ended: whether there is one; a CPU, which
    runs all in order, has none.
    """

    def __init__(self, device: torch.device) -> None:
        self.ended = False
        self._device = device
        self._events: dict[torch.cuda.Stream, torch.cuda.Event] = {}

    def end(self) -> None:
        """Nothing that is launched later on the device's current stream reads the memory: records its event there."""
        if is_capturing():
            raise CaptureError("the reads of a graph end after its replay: call reads_end there, not in a capture")
        if self._device.type == "cuda":
            stream, self.ended = torch.cuda.current_stream(self._device), True
            self._events.setdefault(stream, torch.cuda.Event()).record(stream)

    def wait(self) -> None:
        """Have the device's current stream wait for the event that was recorded last on each stream, if any. Nothing in
        a capture: a graph can't wait for what is not of it.
        """
        if not is_capturing():
            for event in self._events.values():
                torch.cuda.current_stream(self._device).wait_event(event)
