-- Say where a worker's mailbox listens, unless a newer incarnation of the worker exists.
--
-- KEYS[1] epochs     hash  worker -> newest epoch
-- KEYS[2] endpoints  hash  worker -> where its mailbox listens
-- KEYS[3] news       stream  of endpoints, one entry
-- ARGV[1] worker
-- ARGV[2] epoch of the caller
-- ARGV[3] role, endpoint and public key, JSON
-- returns the newest epoch; the write was made when it equals ARGV[2]
local newest = redis.call('HGET', KEYS[1], ARGV[1]) or '0'
if newest == ARGV[2] then
  redis.call('HDEL', KEYS[2], ARGV[1]) -- first, for a server at its memory limit (see register.lua)
  redis.call('HSET', KEYS[2], ARGV[1], ARGV[3])
  redis.call('XADD', KEYS[3], 'MAXLEN', 1, '*', 'worker', ARGV[1])
end
return tonumber(newest)
