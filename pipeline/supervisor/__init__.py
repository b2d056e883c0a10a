"""The supervisor: from the desired fleet to processes."""
