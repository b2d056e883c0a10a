"""Training on several processes, each of which has some consecutive layers of the model: a pipeline.

A model is cut into *stages* (``cut``). The hidden states of a micro-batch go from stage to stage, their gradients come
back, and an order of ``pipeline.schedule`` says what each process computes next. ``runtime`` has it carried out by
torch's own pipeline runtime, which cannot run orders with blocks on several devices; programs can
(``workers.engines.training.ranks.program``).
``backend`` and ``shards`` make the learner's backend of it, on the ranks of ``workers.engines.training.ranks``."""
