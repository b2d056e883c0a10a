"""``headrace score``: a file of responses, scored offline."""
