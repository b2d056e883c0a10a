"""The GPU check: the promises of the real engines on an accelerator, in one table.
``ops/gpu_check.sh`` starts it.

- ``form``: sizes and devices: the GPU form, or without a GPU the CPU form, on tiny models
- ``models``: random models of known shapes, and the operations that they take
- ``sampling``: tokens a second of the engine, against vLLM's own, or ``generate`` of transformers
  without vLLM
- ``learning``: model-FLOPs utilisation of the learner
- ``mismatch``: log-probs of engine and learner on the same weights
- ``runs``: 20 updates of a whole asynchronous run
- ``table``: figures to rows, each held against its bar

Every part runs in a process of its own, so that its end frees the device for the next. A part that
fails is a row of the table."""
