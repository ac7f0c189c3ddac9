"""vLLM's CPU worker, which captures graphs as its GPU worker does."""

from __future__ import annotations

from typing import Any

from triton.runtime import interpreter
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.workspace import init_workspace_manager

from tests.engines.vllm import platform, recorded_graphs, stand_ins
from tests.triton_interpreter import prepare


class Worker(CPUWorker):
    """Overrides the one call after which a GPU worker captures its model."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """CPUWorker calls a compiled operator."""
        stand_ins.install()
        prepare(interpreter)
        super().__init__(*args, **kwargs)

    def compile_or_warm_up_model(self) -> Any:
        """CPUWorker captures nothing."""
        times = super().compile_or_warm_up_model()
        if platform.captures_graphs():
            init_workspace_manager(self.device)
            recorded_graphs.install()
            self.model_runner.capture_model()
        return times
