"""The local generation engine: continuous batching over slots of one KV cache."""
