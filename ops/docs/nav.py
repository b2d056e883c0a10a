"""Which documents are pages of the site, and in which order.

A page is a Markdown file of the repository, where it is. Some are continued with what ``generated`` makes of
the code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

INDEX: Final = "ops/docs/index.md"
"""The first page, which gets the lists of all others."""

SECTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "Tutorial": (
        "README.md",
        "ops/docs/install.md",
        "ops/docs/tutorial.md",
    ),
    "How-to": (
        "ops/RUNBOOK.md",
        "ops/docs/how-to/read-a-run.md",
        "ops/docs/how-to/run-and-resume.md",
        "ops/docs/how-to/change-a-running-run.md",
        "ops/docs/how-to/find-a-bad-worker.md",
        "ops/docs/how-to/dead-letters.md",
        "ops/docs/how-to/standbys-and-snapshots.md",
        "ops/docs/how-to/mirror-checkpoints.md",
        "ops/docs/how-to/ledger-server.md",
        "ops/docs/how-to/several-hosts.md",
        "ops/docs/how-to/launchers.md",
        "ops/docs/how-to/memory-and-disk.md",
        "ops/docs/how-to/larger-models.md",
        "ops/docs/how-to/plan-a-run.md",
        "ops/docs/how-to/pipeline-bubbles.md",
        "ops/docs/how-to/vllm.md",
        "ops/docs/how-to/environments.md",
        "ops/docs/how-to/environments-of-others.md",
        "ops/docs/how-to/agents.md",
        "ops/docs/how-to/learn-from-responses.md",
        "ops/docs/how-to/metrics-elsewhere.md",
        "ops/docs/how-to/replay-updates.md",
        "ops/docs/how-to/upgrade.md",
        "ops/docs/coming-from.md",
        "CONTRIBUTING.md",
    ),
    "Reference": (
        "ops/docs/run-files.md",
        "ops/docs/settings.md",
        "ops/docs/commands.md",
        "ops/docs/exit-codes.md",
        "ops/docs/metrics.md",
        "ops/docs/run-folder.md",
        "ops/docs/python.md",
        "pipeline/data/README.md",
        "pipeline/rewards/README.md",
        "tests/golden/README.md",
        "CHANGELOG.md",
    ),
    "Explanation": (
        "ops/docs/architecture.md",
        "workers/README.md",
        "protocol/chunks.md",
        "pipeline/ledger/README.md",
        "pipeline/ledger/staleness.md",
        "pipeline/ledger/redis/scripts/README.md",
        "protocol/README.md",
        "pipeline/supervisor/recovering.md",
        "ops/docs/rules.md",
        "pipeline/algorithms/README.md",
        "pipeline/fleet/flow/README.md",
        "pipeline/fleet/peers/README.md",
        "SECURITY.md",
        "ops/docs/papers.md",
        "ops/results/README.md",
    ),
}

BELOW: Final[Mapping[str, tuple[str, ...]]] = {
    "ops/results/README.md": (
        "ops/results/demos.md",
        "ops/results/vapo-leave-one-out.md",
        "ops/results/dapo-leave-one-out.md",
        "ops/results/tppo-vs-ppo.md",
        "ops/results/core.md",
        "ops/results/weights.md",
        "ops/results/workers.md",
        "ops/results/watch.md",
        "ops/results/gpu-check.md",
        "ops/results/real-size.md",
        "ops/results/smollm2.md",
        "ops/results/environments.md",
        "ops/results/drills.md",
        "ops/results/mutants.md",
        "ops/results/trace.md",
        "ops/results/nlft.md",
        "ops/results/recover.md",
        "ops/results/fuzz.md",
        "ops/results/verdicts.md",
        "ops/results/schedule.md",
        "ops/results/simulate.md",
        "ops/results/plan.md",
    ),
}
"""The pages listed below a page."""

TITLES: Final[Mapping[str, str]] = {
    "README.md": "Overview",
    "pipeline/algorithms/README.md": "Equations and tests",
    "pipeline/rewards/README.md": "Rewards and verifiers",
}
"""A page's title in the list, if its own heading would not do."""

LEFT_OUT: Final[Mapping[str, str]] = {
    "ops/demo/guided_model/README.md": "a model's card, beside the model",
    "ops/demo/tiny_model/README.md": "a model's card, beside the model",
    "ops/demo/tools_model/README.md": "a model's card, beside the model",
}
"""Documents that are not pages, with the reason."""


def pages() -> Iterator[str]:
    """Yield every page, starting with the index."""
    yield INDEX
    for listed in (*SECTIONS.values(), *BELOW.values()):
        yield from listed
