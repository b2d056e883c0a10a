"""The modules that workers import, by role."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from pipeline.config.schema import RunConfig
from protocol.ids import Role

ROLES = {
    Role.GENERATOR: "workers.generator.generator",
    Role.LEARNER: "workers.learner.learner",
    Role.OBSERVER: "workers.observer.observer",
    Role.REFERENCE: "workers.scorers.reference",
    Role.REWARD: "workers.scorers.reward",
    Role.VALUE: "workers.scorers.value",
}


def imports(config: RunConfig, roles: Collection[Role] = tuple(ROLES)) -> Iterator[str]:
    """Yield the modules that workers of these roles import in a configuration, but for vLLM's."""
    yield from (module for role, module in ROLES.items() if role in roles)
    if Role.GENERATOR in roles and config.has_sampling and config.generation.engine == "local":
        yield "workers.engines.generation.local.build"
    if Role.LEARNER in roles and config.learner.backend == "torch":
        yield "workers.engines.training.torch"
    if Role.REFERENCE in roles and config.has_reference and config.reference.backend == "torch":
        yield "workers.engines.scoring.torch"
    if Role.VALUE in roles and config.declaration.has_critic and config.value.backend == "torch":
        yield "workers.engines.value.torch"
    if Role.REWARD in roles and config.reward.model is not None:
        yield "workers.engines.scoring.reward_model"
