"""Claims about the learning rules. Shapes are checked at every call (pyproject:
--jaxtyping-packages)."""
