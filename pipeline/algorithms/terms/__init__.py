"""The terms of learning rules: ratio, clip, importance weights, KL, aggregation, advantages, guidance.

Each function is one equation, with its shapes and source. README.md beside this package maps the
equations to functions and golden vectors."""
