-- depart.lua: forget a worker that leaves in good order; nothing when a newer incarnation of it
-- exists. Its epoch stays.
--
-- KEYS[1]  epochs         hash     worker -> newest epoch
-- KEYS[2]  endpoints      hash     worker -> where its mailbox listens
-- KEYS[3]  heartbeats     hash     worker -> its last heartbeat
-- KEYS[4]  seen           zset     worker by the server's time of its last sign of life
-- KEYS[5]  endpoint_news  stream   one entry
-- ARGV[1]  worker         text
-- ARGV[2]  epoch          integer  of the caller
-- Returns  1 when it was forgotten, else 0

local epochs, endpoints, heartbeats, seen, endpoint_news = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local worker, epoch = ARGV[1], ARGV[2]
if redis.call('HGET', epochs, worker) ~= epoch then
  return 0
end
local had_endpoint = redis.call('HDEL', endpoints, worker)
redis.call('HDEL', heartbeats, worker)
redis.call('ZREM', seen, worker)
if had_endpoint == 1 then
  redis.call('XADD', endpoint_news, 'MAXLEN', 1, '*', 'worker', worker)
end
return 1
