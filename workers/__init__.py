"""Floor 2: the processes, and the engines that they drive. Started by ``protocol.headrace``."""
