"""The GPU check: engines and learner on this machine's card, beside their rivals, in eight minutes.

- ``form``: devices and sizes, and the configuration around them. Without a GPU: tiny models on the CPU
- ``models``: random models of known shapes, and their floating-point operations
- ``learning``: a step of the learner, of plain transformers loops and of TRL; publishing a version
- ``sampling``: the engine against vLLM's own offline ``generate``; log-probs of engine and learner
- ``runs``: whole asynchronous runs, and vLLM's own start
- ``parts``: which parts there are, and their seconds; each in its own process with a time limit
- ``table``: what is compared with what, the bars, and the page"""
