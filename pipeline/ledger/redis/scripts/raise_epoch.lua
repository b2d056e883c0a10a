-- raise_epoch.lua: note a worker's epoch on a server that has no registry, which fences its earlier
-- incarnations there.
--
-- Uses     beginning
-- Writes   epochs
-- ARGV[4]  of     text     the worker
-- ARGV[5]  least  integer  its epoch, unless a later one is known
-- Returns  its newest epoch

local of, least = ARGV[4], tonumber(ARGV[5])
allow_growth()
local newest = newest_epoch(of)
if newest == math.huge then newest = 0 end
if least > newest then
  call('HSET', P .. 'epochs', of, least)
  newest = least
end
return newest
