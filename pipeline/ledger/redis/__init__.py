"""The ledger in Redis, one Lua script per transition. Only this package and the registry import redis-py."""
