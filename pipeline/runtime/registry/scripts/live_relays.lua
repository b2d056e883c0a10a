-- live_relays.lua: read the relays at some places, among those that arrived before the caller. Remove
-- those whose worker has been silent or was replaced.
--
-- KEYS[1]  epochs        hash     worker -> newest epoch
-- KEYS[2]  seen          zset     worker by the server's time of its last sign of life
-- KEYS[3]  relays        hash     worker -> epoch, a space, and its announcement
-- KEYS[4]  relay_order   zset     relays in order of arrival
-- ARGV[1]  worker        text     of the caller
-- ARGV[2]  positions     text     from 0, separated by spaces
-- ARGV[3]  silent_after  number?  seconds after which a silent worker is left out
-- Returns  the announcements, in the order of positions

local epochs, seen, relays, relay_order = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local worker, positions, silent_after = ARGV[1], ARGV[2], ARGV[3]
local own = redis.call('ZRANK', relay_order, worker) or redis.call('ZCARD', relay_order)
local since = redis.call('TIME')[1] - silent_after
local before = {}
for place in string.gmatch(positions, '%d+') do
  if tonumber(place) < own then
    before[#before + 1] = redis.call('ZRANGE', relay_order, place, place)[1]
  end
end
local found = {}
for _, other in ipairs(before) do
  local at = redis.call('ZSCORE', seen, other)
  local epoch, relay = string.match(redis.call('HGET', relays, other) or '', '^(%d+) (.*)$')
  if at and tonumber(at) >= since and epoch == redis.call('HGET', epochs, other) then
    found[#found + 1] = relay
  else
    redis.call('HDEL', relays, other)
    redis.call('ZREM', relay_order, other)
  end
end
return found
