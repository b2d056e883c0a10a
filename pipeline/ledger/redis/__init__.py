"""The ledger in Redis: one Lua script a transition. Only here and in the registry: redis-py."""
