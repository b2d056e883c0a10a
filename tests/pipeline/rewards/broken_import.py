# the import fails: the tests need such a file
import nothing_of_this_name  # noqa: F401  # pyright: ignore[reportMissingImports]

judge = len
