"""Every update that a learner made, so that it can be made again: what went in, in which order, and
what came out.

``records`` are the words, ``frames`` the bytes, ``folder`` the files, ``plan`` what must be run to
make a version again.
"""
