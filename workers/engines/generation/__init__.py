"""Generation: the seam, and the engines behind it."""
