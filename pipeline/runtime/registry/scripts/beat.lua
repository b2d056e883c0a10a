-- beat.lua: replace a worker's heartbeat, unless a newer incarnation of it exists.
--
-- KEYS[1]  epochs      hash     worker -> newest epoch
-- KEYS[2]  heartbeats  hash     worker -> its last heartbeat
-- KEYS[3]  seen        zset     worker by the server's time of its last sign of life
-- ARGV[1]  worker      text
-- ARGV[2]  epoch       integer  of the incarnation that beats
-- ARGV[3]  heartbeat   bytes    JSON
-- Returns  1, or 0 when the incarnation is fenced and nothing was written
--
-- The removal comes first so that a server at its memory limit still takes heartbeats (see
-- register.lua).

local epochs, heartbeats, seen = KEYS[1], KEYS[2], KEYS[3]
local worker, epoch, heartbeat = ARGV[1], ARGV[2], ARGV[3]
if redis.call('HGET', epochs, worker) ~= epoch then
  return 0
end
redis.call('HDEL', heartbeats, worker)
redis.call('HSET', heartbeats, worker, heartbeat)
redis.call('ZADD', seen, redis.call('TIME')[1], worker)
return 1
