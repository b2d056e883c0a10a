-- advance.lua: make a policy version the one that admission counts from. It only grows.
--
-- Writes   counters
-- ARGV[4]  version
-- Returns  the version that now counts

allow_growth()
local version = math.max(counter('version'), tonumber(ARGV[4]))
call('HSET', COUNTERS, 'version', version)
return version
