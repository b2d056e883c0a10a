-- drops.lua: the counters and tallies of what was trained and what was dropped.
--
-- Uses     beginning
-- Reads    counters tallies
-- Returns  { counters as name, value, ...; tallies the same }

return { call('HGETALL', COUNTERS), call('HGETALL', P .. 'tallies') }
