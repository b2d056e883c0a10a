"""The cost of a weight update: bytes, seconds from the learner's publishing to the first step under it, and the
pause.

- ``actor``: the runtime around a worker, for both sides
- ``generator``: a generator's process: the local engine decodes, and takes versions by the generator's own code;
  models of a given size
- ``learner``: the other side: the learner's own publisher, a real registry, and the clock"""
