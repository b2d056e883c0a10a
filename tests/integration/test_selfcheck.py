"""A generator of a running fleet that samples other tokens than its peers, without an error, is
named by a self-check; the run goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ops.drill.fleet import DrillFleet, until
from ops.drill.orders import write_orders
from pipeline import cli
from tests.integration.trial_fleet import SETTINGS, VERDICT_S

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]
SMALL = ("fleet.reward=1", "fleet.reference=1", "data.evaluation=[]", "evaluation.every_updates=0")


def test_the_generator_that_computes_wrongly_is_named_and_the_run_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = DrillFleet(tmp_path, [*SETTINGS, *SMALL], verdict_s=VERDICT_S)
    run = str(fleet.run_dir)

    def selfcheck(*words: str) -> tuple[object, str]:
        with pytest.raises(SystemExit) as end:
            cli.main(["fleet", "selfcheck", *words])
        return end.value.code, capsys.readouterr().out

    try:
        fleet.start()
        assert until(lambda: len(fleet.updates()) > 1 or fleet.is_over(), 120.0, poll_s=0.5) and not fleet.is_over()
        code, said = selfcheck("--fleet", run)
        assert code == 0 and "3 generators compute the same" in said
        write_orders(fleet.orders, "generator-1", {"garbage": True})
        code, said = selfcheck("--fleet", run, "--json")
        told = json.loads(said)
        assert code == 1 and told["found"]["workers"] == ["generator-1"] and told["silent"] == []
        made = len(fleet.updates())
        assert until(lambda: len(fleet.updates()) > made, 60.0, poll_s=0.5), "the run goes on"
    finally:
        fleet.close()
    fleet.remove()
