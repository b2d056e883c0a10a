"""``headrace score``: score a file of responses offline."""
