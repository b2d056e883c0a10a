-- beat.lua: replace a worker's heartbeat, unless a newer incarnation of it exists.
--
-- KEYS[1]  epochs      hash     worker -> newest epoch
-- KEYS[2]  heartbeats  hash     worker -> [the server's time, its last heartbeat], JSON
-- KEYS[3]  seen        zset     worker by the server's time of its last sign of life
-- KEYS[4]  versions    zset     worker by role and policy version
-- KEYS[5]  reaching    zset     generator that reaches its scorers by the server's time
-- ARGV[1]  worker      text
-- ARGV[2]  epoch       integer  of the incarnation that beats
-- ARGV[3]  heartbeat   bytes    JSON
-- ARGV[4]  standing    integer  role and policy version as one number
-- ARGV[5]  reaches     flag     a generator that reaches its scorers
-- Returns  1, or 0 when the incarnation is fenced and nothing was written
--
-- The removal comes first so that a server at its memory limit still takes heartbeats (see
-- register.lua).

local epochs, heartbeats, seen, versions, reaching = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local worker, epoch, heartbeat, standing, reaches = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5] == '1'
if redis.call('HGET', epochs, worker) ~= epoch then
  return 0
end
local time = redis.call('TIME')
local now = time[1] .. '.' .. string.format('%06d', time[2])
redis.call('HDEL', heartbeats, worker)
redis.call('HSET', heartbeats, worker, '[' .. now .. ',' .. heartbeat .. ']')
redis.call('ZADD', seen, now, worker)
redis.call('ZADD', versions, standing, worker)
if reaches then
  redis.call('ZADD', reaching, now, worker)
else
  redis.call('ZREM', reaching, worker)
end
return 1
