"""Where the reads of a memory end: an event. What overwrites the memory waits for it, on whatever stream."""

from __future__ import annotations

import torch

from attn_backends.errors import CaptureError
from attn_backends.graphs import is_capturing


class Reads:
    """What reads a memory of a device. ended: whether an event says where. On a CPU all is in order, and none does."""

    def __init__(self, device: torch.device) -> None:
        self.ended = False
        self._device = device
        self._event: torch.cuda.Event | None = None

    def end(self) -> None:
        """Nothing that is launched later reads the memory: records the event on the device's current stream."""
        if is_capturing():
            raise CaptureError("the reads of a graph end after its replay: call reads_end there, not in a capture")
        if self._device.type == "cuda":
            self.ended, self._event = True, self._event or torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(self._device))

    def wait(self) -> None:
        """Have the device's current stream wait for the event that was recorded last, if any. Nothing in a capture: a
        graph can't wait for what is not of it.
        """
        if self._event is not None and not is_capturing():
            torch.cuda.current_stream(self._device).wait_event(self._event)
