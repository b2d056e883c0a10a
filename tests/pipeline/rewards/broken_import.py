import nothing_of_this_name  # noqa: F401

judge = len
