"""Writes a run's metrics to TensorBoard, Weights & Biases or MLflow, in addition to its history.

    history.jsonl, value-history.jsonl, fleet-history.jsonl  ->  points  ->  pump  ->  a sink

What a sink has written is recorded in ``<run_dir>/sinks``. A resumed run therefore writes nothing twice,
and what a sink could not take is read from the history again later."""
