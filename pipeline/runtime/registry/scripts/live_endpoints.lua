-- live_endpoints.lua: read the endpoints of the workers that gave a sign of life lately.
--
-- KEYS[1]  endpoints     hash     worker -> role, endpoint and public key, JSON
-- KEYS[2]  seen          zset     worker by the server's time of its last sign of life
-- ARGV[1]  silent_after  number?  seconds after which a silent worker is left out
-- Returns  worker, JSON, worker, JSON ...

local endpoints, seen = KEYS[1], KEYS[2]
local silent_after = ARGV[1]
local since = redis.call('TIME')[1] - silent_after
local found = {}
local bound = redis.call('HGETALL', endpoints) -- few: most workers have no mailbox
for place = 1, #bound, 2 do
  local at = redis.call('ZSCORE', seen, bound[place])
  if at and tonumber(at) >= since then
    found[#found + 1] = bound[place]
    found[#found + 1] = bound[place + 1]
  end
end
return found
