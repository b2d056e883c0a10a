-- Replace a worker's heartbeat, unless a newer incarnation of it exists.
--
-- KEYS[1] epochs      hash  worker -> newest epoch
-- KEYS[2] heartbeats  hash  worker -> its last heartbeat
-- KEYS[3] seen        zset  worker by the server's time of its last sign of life
-- ARGV[1] worker
-- ARGV[2] epoch of the incarnation that beats
-- ARGV[3] heartbeat, JSON
-- returns 1, or 0 when the incarnation is fenced and nothing was written
--
-- The removal comes first so that a server at its memory limit still takes heartbeats (see
-- register.lua).
if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then
  return 0
end
redis.call('HDEL', KEYS[2], ARGV[1])
redis.call('HSET', KEYS[2], ARGV[1], ARGV[3])
redis.call('ZADD', KEYS[3], redis.call('TIME')[1], ARGV[1])
return 1
