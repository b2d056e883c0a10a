-- sync.lua: write something, so that the connection then waits until the append-only file contains this
-- and everything before it.
--
-- Uses     beginning counts
-- Writes   counters
-- ARGV[4]  outcome  text     of an earlier wait: 'flushed'; 'unflushed' when this server cannot
--                            tell; '' before the wait
-- Returns  how many consecutive waits ended without the server's confirmation

local outcome = ARGV[4]
allow_growth()
count('syncs', 1)
if outcome == 'unflushed' then count('unflushed', 1) end
if outcome == 'flushed' then count('unflushed', -counter('unflushed')) end
return counter('unflushed')
