"""Stacks of a run's threads and asyncio tasks, written on request, then read and compared.

A worker dumps its stacks on request, even while its loop or the interpreter is blocked (``dump``).
The reader asks all workers at once (``request``), several times, and finds those that hang
elsewhere than the others of their role (``parse``)."""
