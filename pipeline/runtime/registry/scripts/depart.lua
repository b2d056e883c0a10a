-- depart.lua: remove a worker that leaves, unless a newer incarnation of it exists. Its epoch is kept,
-- and the error that ended it, if any.
--
-- Uses     mailboxes
-- KEYS[1]  epochs            hash     worker -> newest epoch
-- KEYS[2]  endpoints         hash     worker -> where its mailbox listens
-- KEYS[3]  heartbeats        hash     worker -> its last heartbeat
-- KEYS[4]  seen              zset     worker by the server's time of its last sign of life
-- KEYS[5]  versions          zset     worker by role and policy version
-- KEYS[6]  reaching          set      generators that reach their scorers
-- KEYS[7]  endpoint_changes  zset     worker by the number of its mailbox's last change
-- KEYS[8]  endpoint_news     stream   one entry
-- KEYS[9]  mailboxes         zset     worker with a mailbox by the time of its last sign of life
-- KEYS[10] failures          zset     errors that ended workers by the server's time
-- ARGV[1]  worker            text
-- ARGV[2]  epoch             integer  of the caller
-- ARGV[3]  failure           bytes    the error as JSON; empty after a drain
-- ARGV[4]  max_failures      integer  of which the newest are kept
-- Returns  1 when it was removed, else 0

local epochs, endpoints, heartbeats, seen, versions = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local reaching, endpoint_changes, endpoint_news, mailboxes = KEYS[6], KEYS[7], KEYS[8], KEYS[9]
local failures = KEYS[10]
local worker, epoch, failure, max_failures = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
if redis.call('HGET', epochs, worker) ~= epoch then
  return 0
end
local had_endpoint = redis.call('HDEL', endpoints, worker)
redis.call('HDEL', heartbeats, worker)
redis.call('ZREM', seen, worker)
redis.call('ZREM', versions, worker)
redis.call('SREM', reaching, worker)
redis.call('ZREM', mailboxes, worker)
if had_endpoint == 1 then
  note_change(endpoint_changes, endpoint_news, worker)
end
if failure ~= '' then
  local now = redis.call('TIME')
  redis.call('ZADD', failures, now[1] + now[2] / 1000000, failure)
  redis.call('ZREMRANGEBYRANK', failures, 0, -max_failures - 1)
end
return 1
