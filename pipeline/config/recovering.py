"""The table of a run file for repairs: policy, deadlines and budgets."""

from __future__ import annotations

from typing import Literal

from pipeline.config.base import Positive, Section, setting


class RecoverySection(Section):
    """Repairs of a worker that is lost or suspected, beyond the restarts of dead and stuck ones."""

    policy: Literal["act", "own_signs", "advise"] = setting(
        "own_signs",
        "act: the observer's incidents also restart and evict workers. own_signs: only exits and hangs that the "
        "supervisor sees itself do, and incidents lead to advice. advise: nothing is evicted, and `repairs.jsonl` "
        "says what would have been done. Dead and stuck workers are always restarted.",
    )
    tolerate_s: float = setting(
        10.0, "An incident about a worker is ignored until it has been observed for this long in total.", gt=0.0
    )
    restart_timeout_s: float | None = setting(
        None,
        "A worker that neither works nor loads anything more for this long after its loss goes to the next repair. Absent: "
        "supervisor.start_timeout_s and a minute.",
        gt=0.0,
    )
    steady_s: float = setting(30.0, "A worker is repaired once it has worked for this long.", gt=0.0)
    settle_s: float = setting(
        150.0, "An incident that is still open this long after a restart was not repaired by it.", gt=0.0
    )
    max_repairs: Positive = setting(
        5, "Losses of one worker in a row without steady_s of work in between. One more evicts it."
    )
    link_alarms: int = setting(
        2, "Incidents about the links of one worker within link_window_s that are tolerated.", ge=0
    )
    link_window_s: float = setting(300.0, "Time over which link_alarms counts.", gt=0.0)
    incident_restarts: int = setting(
        3, "Restarts of one worker within window_s because of incidents. After that it is evicted.", ge=0
    )
    max_evictions: int = setting(
        2, "Workers that the supervisor may evict within window_s. 0: none. A person may evict more.", ge=0
    )
    faults_per_day: float = setting(
        0.0023,
        'Losses of one worker a day, from which fleet.standby = "auto" follows. With three repairs the run\'s own count, if '
        "they are more.",
        ge=0.0,
    )
    window_s: float = setting(3600.0, "Time over which incident_restarts and max_evictions count.", gt=0.0)
