-- advance.lua: make a policy version the one from which admission counts. It only grows.
--
-- Uses     beginning counts
-- Writes   counters
-- ARGV[4]  version  integer
-- Returns  the version that counts now

local version = tonumber(ARGV[4])
allow_growth()
local newest = math.max(counter('version'), version)
call('HSET', COUNTERS, 'version', newest)
return newest
