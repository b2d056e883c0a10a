-- Read the endpoints of the workers that gave a sign of life lately.
--
-- KEYS[1] endpoints  hash  worker -> role, endpoint and public key, JSON
-- KEYS[2] seen       zset  worker by the server's time of its last sign of life
-- ARGV[1] seconds after which a silent worker is left out
-- returns worker, JSON, worker, JSON ...
local since = redis.call('TIME')[1] - ARGV[1]
local found = {}
for _, worker in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], since, '+inf')) do
  local endpoint = redis.call('HGET', KEYS[1], worker)
  if endpoint then
    found[#found + 1] = worker
    found[#found + 1] = endpoint
  end
end
return found
