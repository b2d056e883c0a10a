"""The messages between Headrace's processes, and how they travel.

    ids, trajectory, messages     the nouns, and every message made of them
    arrays, codec                 messages to bytes and back, checked; limits and validate are its checks
    peek                          any message as readable text, even one that cannot be decoded
    channel                       the contract of mailboxes and links
    zeromq                        its implementation, and the only importer of pyzmq
    endpoints                     addresses, parsed and checked
    errors                        every error that one part may raise for another to handle

Nothing here imports torch, Redis, ``pipeline`` or ``workers``. The wire is specified in
``protocol/README.md``."""
