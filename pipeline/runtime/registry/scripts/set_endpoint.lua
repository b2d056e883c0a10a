-- set_endpoint.lua: record where a worker's mailbox listens, unless a newer incarnation of the worker
-- exists.
--
-- Uses     epochs mailboxes
-- KEYS[1]  epochs            hash     worker -> newest epoch
-- KEYS[2]  endpoints         hash     worker -> where its mailbox listens
-- KEYS[3]  endpoint_changes  zset     worker by the number of its mailbox's last change
-- KEYS[4]  endpoint_news     stream   one entry
-- KEYS[5]  mailboxes         zset     worker with a mailbox by the time of its last sign of life
-- ARGV[1]  worker            text
-- ARGV[2]  epoch             integer  of the caller
-- ARGV[3]  endpoint          bytes    role, endpoint and public key, JSON
-- Returns  the newest epoch; the endpoint was set if that is the caller's

local epochs, endpoints, endpoint_changes, endpoint_news = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local mailboxes = KEYS[5]
local worker, epoch, endpoint = ARGV[1], ARGV[2], ARGV[3]
local newest = newest_epoch(epochs, worker)
if newest == epoch then
  redis.call('HDEL', endpoints, worker) -- first, for a server at its memory limit (see register.lua)
  redis.call('HSET', endpoints, worker, endpoint)
  redis.call('ZADD', mailboxes, redis.call('TIME')[1], worker)
  note_change(endpoint_changes, endpoint_news, worker)
end
return tonumber(newest) or 0
