-- mend.lua: remove a key that has the wrong type, since nothing could be read from it or written to it.
--
-- Uses     epochs
-- KEYS[1]  any     string  the key, of whatever type
-- ARGV[1]  wanted  text  the type that it must have
-- Returns  1 when it was removed, else 0
--
-- If it has the epochs, all workers are fenced. The next epoch of each is derived from the time, and so
-- above all earlier ones; see register.lua.

local any, wanted = KEYS[1], ARGV[1]
local found = redis.call('TYPE', any)
found = type(found) == 'table' and found.ok or found
if found == 'none' or found == wanted then
  return 0
end
redis.call('DEL', any)
if string.match(any, ':epochs$') then
  redis.call('HSET', any, '', epoch_by_time())
end
return 1
