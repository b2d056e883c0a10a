"""The ledger in Redis: one Lua script a transition. With ``pipeline.runtime.registry`` the door to Redis."""
