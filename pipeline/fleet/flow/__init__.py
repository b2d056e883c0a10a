"""Finds where progress has stopped and who waits for whom, from worker states and link counters, live
or from tables.

``FlowWatch`` reads rows tick by tick and returns an incident once a stall has a known cause. Nothing
here does I/O or reads a clock: numbers and times come as arguments. The README maps each rule to its
function."""
