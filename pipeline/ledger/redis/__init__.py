"""The ledger in Redis: one Lua script a transition. With ``pipeline.runtime.registry.contract`` the
door to Redis.
"""
