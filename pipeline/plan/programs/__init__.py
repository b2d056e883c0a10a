"""A model on devices, as a list of actions for each of them: made in three phases, and checked before anything runs.

``operators`` describe a model, ``split`` cuts its operators into shards (transformation), ``placing`` says where and
when each shard runs (space-time scheduling), ``preserve`` inserts what moves between them (dependency preservation).
The result is a program (``actions``). ``check`` says whether it computes what the model computes; it knows nothing of
how the program was made. The phases are SuperScaler's (arXiv 2301.08984)."""
