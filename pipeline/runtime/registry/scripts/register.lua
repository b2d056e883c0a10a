-- Hand out the next epoch of a worker, which fences every earlier incarnation of it.
--
-- KEYS[1] epochs      hash  worker -> newest epoch
-- KEYS[2] endpoints   hash  worker -> where its mailbox listens
-- KEYS[3] heartbeats  hash  worker -> its last heartbeat
-- KEYS[4] seen        zset  worker by the server's time of its last sign of life
-- KEYS[5] news        stream  of endpoints, one entry
-- ARGV[1] worker
-- ARGV[2] "1" when a new incarnation begins its life, "0" when the worker is only fenced
-- returns the new epoch
--
-- The removals come first on purpose: a server at its memory limit refuses a script's growing
-- writes, except after one that cannot grow. Registering must work then too, since it is learners
-- and scorers that make room.
local had_endpoint = redis.call('HDEL', KEYS[2], ARGV[1])
redis.call('HDEL', KEYS[3], ARGV[1])
redis.call('ZREM', KEYS[4], ARGV[1])
if had_endpoint == 1 then
  redis.call('XADD', KEYS[5], 'MAXLEN', 1, '*', 'worker', ARGV[1])
end
local epoch = redis.call('HINCRBY', KEYS[1], ARGV[1], 1)
if ARGV[2] == '1' then
  redis.call('ZADD', KEYS[4], redis.call('TIME')[1], ARGV[1])
end
return epoch
