-- Forget a worker that leaves in good order; nothing when a newer incarnation of it exists. Its
-- epoch stays.
--
-- KEYS[1] epochs      hash  worker -> newest epoch
-- KEYS[2] endpoints   hash  worker -> where its mailbox listens
-- KEYS[3] heartbeats  hash  worker -> its last heartbeat
-- KEYS[4] seen        zset  worker by the server's time of its last sign of life
-- KEYS[5] news        stream  of endpoints, one entry
-- ARGV[1] worker
-- ARGV[2] epoch of the caller
-- returns 1 when it was forgotten, else 0
if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then
  return 0
end
local had_endpoint = redis.call('HDEL', KEYS[2], ARGV[1])
redis.call('HDEL', KEYS[3], ARGV[1])
redis.call('ZREM', KEYS[4], ARGV[1])
if had_endpoint == 1 then
  redis.call('XADD', KEYS[5], 'MAXLEN', 1, '*', 'worker', ARGV[1])
end
return 1
