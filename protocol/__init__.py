"""The messages between Headrace's processes, and how they travel.

    ids, trajectory, messages     data types, and the messages made of them
    arrays, codec                 encode and decode messages, with the checks in limits and validate
    peek                          any message as readable text, even one that cannot be decoded
    channel                       the contract of mailboxes and links
    zeromq                        its implementation, and the only importer of pyzmq
    endpoints                     addresses, parsed and checked
    errors                        every error that one part may raise for another to handle

Nothing here imports torch, Redis, ``pipeline`` or ``workers``. ``protocol/README.md`` specifies the wire
format."""
