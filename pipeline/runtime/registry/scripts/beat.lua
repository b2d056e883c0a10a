-- beat.lua: replace a worker's heartbeat, unless a newer incarnation of it exists.
--
-- KEYS[1]  epochs      hash      worker -> newest epoch
-- KEYS[2]  heartbeats  hash      worker -> its last heartbeat
-- KEYS[3]  seen        zset      worker by the server's time of its last sign of life
-- KEYS[4]  versions    zset      worker by role and policy version
-- KEYS[5]  reaching    set       generators that reach their scorers
-- KEYS[6]  mailboxes   zset      worker with a mailbox by the time of its last sign of life
-- ARGV[1]  worker      text
-- ARGV[2]  epoch       integer   of the incarnation that beats
-- ARGV[3]  heartbeat   bytes     JSON
-- ARGV[4]  standing    integer?  role and policy version as one number; none: as in the last heartbeat
-- ARGV[5]  reaches     flag      a generator that reaches its scorers; read with a standing
-- Returns  1, or 0 when the incarnation is fenced and nothing was written
--
-- A removal comes first, here of nothing, so that a server at its memory limit still takes
-- heartbeats (see register.lua). A thousand workers call this a thousand times a second.

local epochs, heartbeats, seen, versions = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local reaching, mailboxes = KEYS[5], KEYS[6]
local worker, epoch, heartbeat, standing, reaches = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5] == '1'
if redis.call('HGET', epochs, worker) ~= epoch then
  return 0
end
local time = redis.call('TIME')
redis.call('HDEL', heartbeats, '')
redis.call('HSET', heartbeats, worker, heartbeat)
local now = time[1] .. string.format('.%06d', time[2])
redis.call('ZADD', seen, now, worker)
redis.call('ZADD', mailboxes, 'XX', now, worker)
if standing ~= '' then
  redis.call('ZADD', versions, standing, worker)
  redis.call(reaches and 'SADD' or 'SREM', reaching, worker)
end
return 1
