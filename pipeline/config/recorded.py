"""Rules of a run that learns from recorded responses (``data.responses``) and samples none.

The policy that wrote a recorded response is unknown. So nothing may weigh a response by the
probability with which it was sampled, and a response does not age while it waits."""

from __future__ import annotations

from pipeline.config.learning import AlgorithmSection, DataSection, StalenessSection


def check_recorded(data: DataSection, algorithm: AlgorithmSection, staleness: StalenessSection) -> None:
    """Raise ValueError for settings that recorded responses cannot fulfil."""
    if not data.responses:
        return
    if algorithm.group_size != 1:
        raise ValueError(
            f"algorithm.group_size is {algorithm.group_size}, but a line of data.responses is one response, compared with "
            "no others; set algorithm.group_size to 1"
        )
    reading = {
        "importance": algorithm.importance != "none",
        "rejection": algorithm.rejection != "none",
        "proximal": algorithm.proximal != "recompute",
    }
    for name in (name for name, reads in reading.items() if reads):
        expected = "recompute" if name == "proximal" else "none"
        raise ValueError(
            f"algorithm.{name} is {getattr(algorithm, name)}, which reads the log-probs of the policy that sampled, and of "
            f"data.responses these are unknown; set algorithm.{name} to {expected}"
        )
    if staleness.late != "wait":
        raise ValueError(
            f"staleness.late is {staleness.late}, which drops responses that wait too long, but a recorded response does not "
            "age; set staleness.late to wait"
        )
