"""The picture of a conformance case: the metadata that its check looks at, on the same world and batch."""

from __future__ import annotations

from torch import Tensor

from attn_backends.conformance.cases import Case
from attn_backends.conformance.catalogue import Subject
from attn_backends.conformance.exercise import batch_of, bucket_of, captured_batch_of, scene_of, setup_of, world_of
from attn_backends.conformance.scenes import Scene
from attn_backends.conformance.worlds import World
from attn_backends.errors import ConfigError
from attn_backends.explain.picture import Picture, explain
from attn_backends.explain.reading import Reader
from spec_metadata import StepKind

WITH_TAILS = ("poison.table_tail", "poison.planned_tails")


def case_picture(subject: Subject, case: Case) -> Picture:
    """The picture of a case's batch on its path; through a graph, as it is replayed after the captured batch.

    Raises `ConfigError` for a case of requests too long for its world, and what the backend refuses the step with, as
    it must in a case of `refusals`.
    """
    world = world_of(setup_of(subject, case))
    longest, most = max((*case.lens, *case.captured_lens, 0)), world.capacity.max_context
    if longest > most:
        raise ConfigError(
            f"the case has requests of {longest} committed tokens, and its world holds {most} at pages of "
            f"{case.page_size}; give it a size"
        )
    if case.path == "eager":
        scene = _scene(world, case, case.seed)
        step = scene.step()
        return explain(world.backend.init_forward_metadata(step), step, _ancestors(scene))
    captured = scene_of(world, captured_batch_of(case), case.seed)
    meta = world.backend.capture(bucket_of(world, case), world.paging())
    world.backend.replay(meta, captured.step())
    reader = Reader(meta)
    scene = _scene(world, case, case.seed + 1)
    step = scene.step()
    world.backend.replay(meta, step)
    return explain(reader, step, _ancestors(scene))


def _scene(world: World, case: Case, seed: int) -> Scene:
    """The batch that is drawn, with what its check writes past the requests' pages of the table."""
    scene = scene_of(world, batch_of(case), seed)
    if case.check in WITH_TAILS:
        scene.poison_table_tails()
    return scene


def _ancestors(scene: Scene) -> list[Tensor]:
    """Of each forward of a drafted tree; none of other batches."""
    if scene.batch.kind is StepKind.IDLE:
        return []
    return [given.ancestors for given in scene.inputs() if given.ancestors is not None]
