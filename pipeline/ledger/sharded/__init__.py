"""One run's ledger spread over several ledgers, its shards, by group.

Each shard is a whole ledger with its own credit, conservation law and transitions. Shard ``s`` of
``S`` admits the groups, and evaluation prompts, ``s``, ``s + S``, ``s + 2S``, ... So a group's
number names its shard, and prompts keep their order. An update's units are shared out evenly.

===========  =========================================================================================
``split``    pure: a shard's specification, the shard of a name, the parts of a claim's id
``merge``    pure: one view out of the shards' views
``ledger``   ``ShardedLedger``: the contract over any ledgers
``admin``    an operator's side of all shards
``servers``  the same over servers, as a run has it
``shares``   claims that take a share of every shard
``calls``    several shards' calls at once
===========  =========================================================================================
"""
