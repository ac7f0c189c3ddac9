"""What a worker of vLLM's counts; each function is called in every worker, by `LLM.collective_rpc`."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_backends.engines.vllm import attended, forget_attended
from attn_backends.engines.vllm.attended import SWITCH
from tests.engines.vllm.kinds import kind_of


class Counts:
    """Of one model runner. replays: of CUDA graphs. steps: of the speculator, by kind. drafting: those that draft: a
    step whose drafts no request has a use for does not. looped: forwards of their loops. Where attention is counted,
    drafts are kept, too, on the device until they are asked for.
    """

    def __init__(self, runner: Any) -> None:
        self.replays = self.looped = self.drafting = 0
        self.steps: Counter[str] = Counter()
        self.kept: list[Step] = []
        self.keeps = os.environ.get(SWITCH) == "1"
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
            lens = batch.num_scheduled_tokens.tolist()
            self.steps[kind_of(lens, *(number for _, _, number in schedule))] += 1
            number = kwargs.get("num_speculative_tokens")
            number = most if number is None else number
            self.drafting += bool(number)
            self.looped += max(0, number - 1)
            drafts = propose(batch, *args, **kwargs)
            if self.keeps:
                self.kept.append(Step.of(batch, lens, drafts[:, :number], args[4], args[5]))
            return drafts

        speculator.propose = counted

    def forget(self) -> None:
        """Count from zero."""
        torch.cuda.synchronize()
        forget_attended()
        self.replays = self.looped = self.drafting = 0
        self.steps.clear()
        self.kept.clear()

    def told(self) -> dict[str, Any]:
        """Since `forget`. cut: batches whose rows the device divided otherwise than the host."""
        torch.cuda.synchronize()
        names = ("replays", "looped", "drafting", "layers", "draft_layers")
        found = {name: getattr(self, name) for name in names} | {"steps": dict(self.steps)}
        return found | {"attended": attended(), "cut": sum(step.is_cut for step in self.kept)}


@dataclass
class Step:
    """What one step drafted. names: of its requests. lens: their query rows on the host. Tensors are copies, since the
    next step has the same buffers: starts of rows, lengths with them, tokens that were sampled and drafts that were
    rejected, by request.
    """

    names: list[str]
    lens: list[int]
    starts: Tensor
    seq_lens: Tensor
    drafts: Tensor
    sampled: Tensor
    rejected: Tensor

    @classmethod
    def of(cls, batch: Any, lens: list[int], drafts: Tensor, sampled: Tensor, rejected: Tensor) -> Step:
        """Of vLLM's batch."""
        num = len(lens)
        of_each = (batch.seq_lens, drafts, sampled, rejected)
        copies = [tensor[:num].clone() for tensor in of_each]
        return cls(list(batch.req_ids), lens, batch.query_start_loc[: num + 1].clone(), *copies)

    @property
    def is_cut(self) -> bool:
        """Whether the device has other rows than the host."""
        return self.starts.diff().tolist() != self.lens

    def told(self) -> list[tuple[int, int, list[int]]]:
        """Number of the request, tokens known by then, and drafts, of each request that has a new token."""
        known = (self.seq_lens - self.rejected + 1).tolist()
        each = zip(self.names, known, self.drafts.tolist(), self.sampled.tolist(), strict=True)
        return [(int(name.split("-")[0]), count, drafts) for name, count, drafts, new in each if new and drafts]


def watch(worker: Any) -> None:
    """Count from now on."""
    worker.model_runner.tests_counts = Counts(worker.model_runner)


def forget(worker: Any) -> None:
    """Count from zero."""
    worker.model_runner.tests_counts.forget()


def told(worker: Any) -> dict[str, Any]:
    """What was counted since."""
    return dict(worker.model_runner.tests_counts.told())


def drafts(worker: Any) -> list[tuple[int, int, list[int]]]:
    """What was drafted since, as of `Step.told`."""
    return [each for step in worker.model_runner.tests_counts.kept for each in step.told()]
