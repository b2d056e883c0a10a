"""Which pages the site has, in which order, and where each has its source.

A page is a Markdown file of the repository, taken from where it lies. Some go on with what
``generated`` makes of the code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

INDEX: Final = "ops/docs/index.md"
"""The first page; the lists of all others are added to it."""

SECTIONS: Final[Mapping[str, Mapping[str, str]]] = {
    "Tutorial": {
        "overview": "README.md",
        "install": "ops/docs/install.md",
        "tutorial": "ops/docs/tutorial.md",
    },
    "How-to": {
        "runbook": "ops/RUNBOOK.md",
        "how-to/read-a-run": "ops/docs/how-to/read-a-run.md",
        "how-to/run-and-resume": "ops/docs/how-to/run-and-resume.md",
        "how-to/change-a-running-run": "ops/docs/how-to/change-a-running-run.md",
        "how-to/find-a-bad-worker": "ops/docs/how-to/find-a-bad-worker.md",
        "how-to/dead-letters": "ops/docs/how-to/dead-letters.md",
        "how-to/standbys-and-snapshots": "ops/docs/how-to/standbys-and-snapshots.md",
        "how-to/mirror-checkpoints": "ops/docs/how-to/mirror-checkpoints.md",
        "how-to/ledger-server": "ops/docs/how-to/ledger-server.md",
        "how-to/several-hosts": "ops/docs/how-to/several-hosts.md",
        "how-to/launchers": "ops/docs/how-to/launchers.md",
        "how-to/memory-and-disk": "ops/docs/how-to/memory-and-disk.md",
        "how-to/larger-models": "ops/docs/how-to/larger-models.md",
        "how-to/vllm": "ops/docs/how-to/vllm.md",
        "how-to/learn-from-responses": "ops/docs/how-to/learn-from-responses.md",
        "how-to/metrics-elsewhere": "ops/docs/how-to/metrics-elsewhere.md",
        "how-to/replay-updates": "ops/docs/how-to/replay-updates.md",
        "how-to/upgrade": "ops/docs/how-to/upgrade.md",
        "coming-from": "ops/docs/coming-from.md",
        "contributing": "CONTRIBUTING.md",
    },
    "Reference": {
        "run-files": "ops/docs/run-files.md",
        "reference/settings": "ops/docs/settings.md",
        "reference/commands": "ops/docs/commands.md",
        "reference/exit-codes": "ops/docs/exit-codes.md",
        "reference/metrics": "ops/docs/metrics.md",
        "reference/run-folder": "ops/docs/run-folder.md",
        "python": "ops/docs/python.md",
        "concepts/data": "pipeline/data/README.md",
        "concepts/rewards": "pipeline/rewards/README.md",
        "reference/vectors": "tests/golden/README.md",
        "reference/changelog": "CHANGELOG.md",
    },
    "Explanation": {
        "concepts/architecture": "ops/docs/architecture.md",
        "concepts/roles": "workers/README.md",
        "concepts/chunks": "protocol/chunks.md",
        "concepts/ledger": "pipeline/ledger/README.md",
        "concepts/staleness": "pipeline/ledger/staleness.md",
        "concepts/scripts": "pipeline/ledger/redis/scripts/README.md",
        "concepts/wire": "protocol/README.md",
        "concepts/hosts": "pipeline/supervisor/launchers/README.md",
        "concepts/recovering": "pipeline/supervisor/recovering.md",
        "concepts/rules": "ops/docs/rules.md",
        "concepts/equations": "pipeline/algorithms/README.md",
        "concepts/flow": "pipeline/flow/README.md",
        "concepts/watch": "pipeline/watch/README.md",
        "concepts/security": "SECURITY.md",
        "results/papers": "ops/docs/papers.md",
        "results/summary": "ops/results/README.md",
    },
}
"""By intent: each page's place in the site, and its source."""

BELOW: Final[Mapping[str, Mapping[str, str]]] = {
    "results/summary": {
        "results/demos": "ops/results/demos.md",
        "results/one-process": "ops/results/one-process.md",
        "results/vapo": "ops/results/vapo-leave-one-out.md",
        "results/vapo-short-chains": "ops/results/vapo-short-chains.md",
        "results/dapo": "ops/results/dapo-leave-one-out.md",
        "results/dapo-ladder": "ops/results/dapo-ladder.md",
        "results/tppo-windows": "ops/results/tppo-windows.md",
        "results/tppo-vs-ppo": "ops/results/tppo-vs-ppo.md",
        "results/core": "ops/results/core.md",
        "results/oversampling": "ops/results/oversampling.md",
        "results/judge": "ops/results/judge.md",
        "results/weights": "ops/results/weights.md",
        "results/hosts": "ops/results/hosts.md",
        "results/join": "ops/results/join.md",
        "results/workers": "ops/results/workers.md",
        "results/views": "ops/results/views.md",
        "results/watch": "ops/results/watch.md",
        "results/gpu-check": "ops/results/gpu-check.md",
        "results/real-size": "ops/results/real-size.md",
        "results/smollm2": "ops/results/smollm2.md",
        "results/drills": "ops/results/drills.md",
        "results/mutants": "ops/results/mutants.md",
        "results/trace": "ops/results/trace.md",
        "results/nlft": "ops/results/nlft.md",
        "results/recover": "ops/results/recover.md",
        "results/fuzz": "ops/results/fuzz.md",
        "results/verdicts": "ops/results/verdicts.md",
    },
}
"""By place of a page: the pages below it in the list, with their sources."""

TITLES: Final[Mapping[str, str]] = {
    "overview": "Overview",
    "concepts/equations": "Equations and tests",
    "concepts/rewards": "Rewards and verifiers",
}
"""By place: a page's title in the list, where its own heading would not do."""

LEFT_OUT: Final[Mapping[str, str]] = {
    "ops/bench/ablation/policy/README.md": "a model's card, beside the model",
    "ops/demo/guided_model/README.md": "a model's card, beside the model",
    "ops/demo/tiny_model/README.md": "a model's card, beside the model",
}
"""Documents that are no page, with the reason."""


def entries() -> Iterator[tuple[str, str]]:
    """Yield every page's place and source, the first page included."""
    yield "index", INDEX
    for pages in (*SECTIONS.values(), *BELOW.values()):
        yield from pages.items()
