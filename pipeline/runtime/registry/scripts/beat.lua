-- beat.lua: replace a worker's heartbeat, unless a newer incarnation of it exists.
--
-- KEYS[1]  epochs        hash      worker -> newest epoch
-- KEYS[2]  heartbeats    hash      worker -> its last heartbeat
-- KEYS[3]  seen          zset      worker by the server's time at its last sign of life
-- KEYS[4]  versions      zset      worker by role and policy version
-- KEYS[5]  reaching      set       generators that reach their scorers
-- KEYS[6]  mailboxes     zset      worker with a mailbox by the time of its last sign of life
-- ARGV[1]  worker        text
-- ARGV[2]  epoch         integer   of the incarnation that beats
-- ARGV[3]  heartbeat     bytes     JSON
-- ARGV[4]  standing      integer?  role and policy version as one number; empty if unchanged
-- ARGV[5]  reaches       flag      a generator that reaches its scorers; used with a standing
-- ARGV[6]  listens       flag      of a role with a mailbox
-- ARGV[7]  kept          flag      written to the append-only file and replicas; otherwise only to memory
-- ARGV[8]  silent_after  number    seconds after which a silent mailbox is left out
-- Returns  { number of workers, number with a silent mailbox, the server's time in microseconds },
--          or {} when the incarnation is fenced and nothing was written
--
-- A thousand workers call this hundreds of times a second, so most heartbeats are not kept: the next one
-- comes soon, even to a server that started afresh.

local epochs, heartbeats, seen, versions = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local reaching, mailboxes = KEYS[5], KEYS[6]
local worker, epoch, heartbeat, standing, reaches = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5] == '1'
local listens, kept, silent_after = ARGV[6] == '1', ARGV[7] == '1', ARGV[8]
if redis.call('HGET', epochs, worker) ~= epoch then
  return {}
end
if not kept then
  redis.set_repl(redis.REPL_NONE)
end
local time = redis.call('TIME')
local written = redis.pcall('HSET', heartbeats, worker, heartbeat)
if type(written) == 'table' then
  -- a removal, even of nothing, lets a server at its memory limit accept the rest (see register.lua)
  redis.call('HDEL', heartbeats, '')
  redis.call('HSET', heartbeats, worker, heartbeat)
end
local now = time[1] .. string.format('.%06d', time[2])
redis.call('ZADD', seen, now, worker)
if listens then
  redis.call('ZADD', mailboxes, 'XX', now, worker)
end
if standing ~= '' then
  redis.call('ZADD', versions, standing, worker)
  redis.call(reaches and 'SADD' or 'SREM', reaching, worker)
end
local num_silent = redis.call('ZCOUNT', mailboxes, '-inf', '(' .. (time[1] - silent_after))
return { redis.call('ZCARD', seen), num_silent, time[1] * 1000000 + time[2] }
