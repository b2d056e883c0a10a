-- register.lua: assign the next epoch of a worker, which fences all its earlier incarnations.
--
-- Uses     epochs mailboxes
-- KEYS[1]  epochs            hash    worker -> newest epoch
-- KEYS[2]  endpoints         hash    worker -> where its mailbox listens
-- KEYS[3]  heartbeats        hash    worker -> its last heartbeat
-- KEYS[4]  seen              zset    worker by the server's time of its last sign of life
-- KEYS[5]  versions          zset    worker by role and policy version
-- KEYS[6]  reaching          set     generators that reach their scorers
-- KEYS[7]  endpoint_changes  zset    worker by the number of its mailbox's last change
-- KEYS[8]  endpoint_news     stream  one entry
-- KEYS[9]  mailboxes         zset    worker with a mailbox by the time of its last sign of life
-- ARGV[1]  worker            text
-- ARGV[2]  begins            flag    a new incarnation begins; otherwise the worker is only fenced
-- Returns  the new epoch
--
-- The removals come first on purpose: a server at its memory limit refuses a script's growing writes,
-- except after one that cannot grow. Registering must work even then, since learners and scorers are what
-- makes room.

local epochs, endpoints, heartbeats, seen, versions = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local reaching, endpoint_changes, endpoint_news, mailboxes = KEYS[6], KEYS[7], KEYS[8], KEYS[9]
local worker, begins = ARGV[1], ARGV[2] == '1'
local had_endpoint = redis.call('HDEL', endpoints, worker)
redis.call('HDEL', heartbeats, worker)
redis.call('ZREM', seen, worker)
redis.call('ZREM', versions, worker)
redis.call('SREM', reaching, worker)
redis.call('ZREM', mailboxes, worker)
if had_endpoint == 1 then
  note_change(endpoint_changes, endpoint_news, worker)
end
-- after the epochs were lost, the lowest epoch is stored under the empty name (see mend.lua)
local newest = newest_epoch(epochs, redis.call('HEXISTS', epochs, worker) == 1 and worker or '')
local epoch = (newest ~= '' and newest or epoch_by_time()) + 1
redis.call('HSET', epochs, worker, string.format('%.0f', epoch))
if begins then
  redis.call('ZADD', seen, redis.call('TIME')[1], worker)
end
return epoch
