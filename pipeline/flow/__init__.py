"""Where progress stops, and who waits for whom: from the states of workers and the counters of
links, live or from tables.

``FlowWatch`` reads rows tick by tick and returns an incident when a stall has a cause. All of it is
pure: numbers and times come as arguments. The README leads from each rule to its function."""
