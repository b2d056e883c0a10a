"""Where a run's metrics are written in addition to its history: TensorBoard, Weights & Biases, MLflow.

    history.jsonl, value-history.jsonl, fleet-history.jsonl  ->  points  ->  pump  ->  a sink

A sink has a record in ``<run_dir>/sinks``, of what it has written. So a resumed run writes nothing
twice, and what a sink could not take yet is read from the history again."""
