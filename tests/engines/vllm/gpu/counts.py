"""What a worker of vLLM's counts; each function is called in every worker, by `LLM.collective_rpc`."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from attn_backends.engines.vllm import attended, forget_attended
from tests.engines.vllm.kinds import kind_of


class Counts:
    """Of one model runner. replays: of CUDA graphs. steps: of the speculator, by kind. looped: forwards of draft loops,
    of which a step has none whose drafts no request has a use for.
    """

    def __init__(self, runner: Any) -> None:
        self.replays = self.looped = 0
        self.steps: Counter[str] = Counter()
        self.layers = sorted(runner.vllm_config.compilation_config.static_forward_context)
        self.draft_layers: list[str] = []
        self._count_replays()
        if runner.speculator is not None:
            self.draft_layers = sorted(runner.speculator.draft_attn_layer_names)
            self._count_steps(runner.speculator)

    def _count_replays(self) -> None:
        graphs: Any = torch.cuda.CUDAGraph
        replay = graphs.replay

        def counted(graph: Any) -> None:
            self.replays += 1
            replay(graph)

        graphs.replay = counted

    def _count_steps(self, speculator: Any) -> None:
        propose, most = speculator.propose, speculator.num_speculative_steps
        schedule = speculator.speculative_config.num_speculative_tokens_per_batch_size or [(1, 1, most)]

        def counted(batch: Any, *args: Any, **kwargs: Any) -> Any:
            self.steps[kind_of(batch.num_scheduled_tokens.tolist(), *(number for _, _, number in schedule))] += 1
            number = kwargs.get("num_speculative_tokens")
            self.looped += max(0, (most if number is None else number) - 1)
            return propose(batch, *args, **kwargs)

        speculator.propose = counted

    def forget(self) -> None:
        """Count from zero."""
        torch.cuda.synchronize()
        forget_attended()
        self.replays = self.looped = 0
        self.steps.clear()

    def told(self) -> dict[str, Any]:
        """Since `forget`."""
        torch.cuda.synchronize()
        return {**vars(self), "steps": dict(self.steps), "attended": attended()}


def watch(worker: Any) -> None:
    """Count from now on."""
    worker.model_runner.tests_counts = Counts(worker.model_runner)


def forget(worker: Any) -> None:
    """Count from zero."""
    worker.model_runner.tests_counts.forget()


def told(worker: Any) -> dict[str, Any]:
    """What was counted since."""
    return dict(worker.model_runner.tests_counts.told())
