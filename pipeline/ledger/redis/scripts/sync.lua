-- sync.lua: write something, so that the connection which then waits for the append-only file waits for this and all before it.
--
-- ARGV[4]  what came of an earlier wait: 'flushed', 'unflushed' when this server cannot say, or absent
-- Writes   counters
-- Returns  how many waits in a row ended without the server's word

allow_growth()
count('syncs', 1)
if ARGV[4] == 'unflushed' then count('unflushed', 1) end
if ARGV[4] == 'flushed' then count('unflushed', -counter('unflushed')) end
return counter('unflushed')
