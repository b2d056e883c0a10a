"""Training: the seam, and the backends behind it."""
