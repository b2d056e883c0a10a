"""The GPU check: the promises of the real engines on an accelerator, in one table. ``ops/gpu_check.sh`` starts it.

- ``form``: devices and sizes, and the configuration around them. Without a GPU: tiny models on the CPU
- ``models``: random models of known shapes, and their floating-point operations
- ``sampling``: tokens a second of the engine, against vLLM's own, or transformers' ``generate`` without vLLM
- ``learning``: model-FLOPs utilisation of the learner
- ``mismatch``: log-probs of engine and learner on the same weights
- ``runs``: 20 updates of a whole asynchronous run
- ``table``: turns figures into rows, each held against its bar

Every part runs in its own process, which frees the device for the next when it ends. A part that fails is a row
of the table."""
