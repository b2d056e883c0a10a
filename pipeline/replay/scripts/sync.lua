-- sync.lua: write something, so that the connection which then waits for the append-only file waits for this and all before it.
--
-- Writes   counters
-- Returns  1

allow_growth()
count('syncs', 1)
return 1
