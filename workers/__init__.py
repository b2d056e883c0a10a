"""Floor 2: the worker processes and the engines that they drive. Started by ``protocol.headrace``."""
