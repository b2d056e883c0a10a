"""The value model: the seam, and the engines behind it."""
