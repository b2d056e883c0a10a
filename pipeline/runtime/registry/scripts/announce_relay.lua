-- announce_relay.lua: record that a worker serves weights, and return its place, unless a newer
-- incarnation of the worker exists.
--
-- Uses     epochs
-- KEYS[1]  epochs       hash     worker -> newest epoch
-- KEYS[2]  relays       hash     worker -> epoch, a space, and its announcement
-- KEYS[3]  relay_order  zset     relays in order of arrival
-- ARGV[1]  worker       text
-- ARGV[2]  epoch        integer  of the caller
-- ARGV[3]  relay        bytes    JSON
-- Returns  { newest epoch, position from 0, number of relays }; both 0 for a fenced caller

local epochs, relays, relay_order = KEYS[1], KEYS[2], KEYS[3]
local worker, epoch, relay = ARGV[1], ARGV[2], ARGV[3]
local newest = newest_epoch(epochs, worker)
if newest ~= epoch then
  return { tonumber(newest) or 0, 0, 0 }
end
redis.call('HDEL', relays, worker) -- first, for a server at its memory limit (see register.lua)
redis.call('HSET', relays, worker, epoch .. ' ' .. relay)
local last = redis.call('ZREVRANGE', relay_order, 0, 0, 'WITHSCORES')
redis.call('ZADD', relay_order, 'NX', (last[2] or 0) + 1, worker)
return { tonumber(newest) or 0, redis.call('ZRANK', relay_order, worker), redis.call('ZCARD', relay_order) }
