-- Read the endpoints of the workers that gave a sign of life lately.
--
-- KEYS[1] endpoints  hash  worker -> role, endpoint and public key, JSON
-- KEYS[2] seen       zset  worker by the server's time of its last sign of life
-- ARGV[1] seconds after which a silent worker is left out
-- returns worker, JSON, worker, JSON ...
local since = redis.call('TIME')[1] - ARGV[1]
local found = {}
local bound = redis.call('HGETALL', KEYS[1]) -- few: most workers have no mailbox
for place = 1, #bound, 2 do
  local seen = redis.call('ZSCORE', KEYS[2], bound[place])
  if seen and tonumber(seen) >= since then
    found[#found + 1] = bound[place]
    found[#found + 1] = bound[place + 1]
  end
end
return found
