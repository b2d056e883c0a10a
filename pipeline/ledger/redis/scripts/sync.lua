-- sync.lua: write something, so that the connection which then waits for the append-only file waits
-- for this and all before it.
--
-- Uses     beginning counts
-- Writes   counters
-- ARGV[4]  outcome  text     of an earlier wait: 'flushed'; 'unflushed' when this server cannot
--                            tell; '' before the wait
-- Returns  how many waits in a row ended without the server's word

local outcome = ARGV[4]
allow_growth()
count('syncs', 1)
if outcome == 'unflushed' then count('unflushed', 1) end
if outcome == 'flushed' then count('unflushed', -counter('unflushed')) end
return counter('unflushed')
