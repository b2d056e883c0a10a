-- drops.lua: the counters and tallies of trained and dropped work.
--
-- Uses     beginning
-- Reads    settings counters tallies
-- Returns  { group size; counters as name, value, ...; tallies the same }

return { S.group_size, call('HGETALL', COUNTERS), call('HGETALL', P .. 'tallies') }
