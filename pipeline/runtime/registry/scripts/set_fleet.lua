-- set_fleet.lua: replace the desired fleet, at a server's memory limit too (see register.lua).
--
-- KEYS[1]  fleet   string
-- ARGV[1]  counts  bytes   JSON
-- Returns  1

local fleet, counts = KEYS[1], ARGV[1]
redis.call('DEL', fleet)
redis.call('SET', fleet, counts)
return 1
