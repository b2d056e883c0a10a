"""The words that Headrace's processes say to one another, and how those words travel.

    ids, trajectory, messages     the nouns, and every message made of them
    arrays, codec                 messages to bytes and back, checked; limits and validate are its checks
    peek                          any message made legible, also one that cannot be decoded
    channel                       what a mailbox and a link promise
    memory, zeromq                two carriers of it under one contract; ``zeromq`` is the only door to pyzmq
    endpoints                     addresses, parsed and checked
    errors                        everything that one part may raise for another to handle

Floor 0: nothing here imports torch, Redis, ``pipeline`` or ``workers``. The wire specification is
``protocol/README.md``.
"""
