"""Floor 2: the processes, a short file per role, and the engines that they drive. Started by
``protocol.headrace``.
"""
