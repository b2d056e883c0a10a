"""Stacks of a run's processes, of their threads and tasks: written on request, read and compared.

A worker writes its stacks on a signal (``dump``), also while its loop or the interpreter is held
up. The reader signals all workers at once (``request``), takes several looks (``parse``), and parts
the odd from the many (``parse``)."""
