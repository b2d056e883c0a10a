-- claim_finished.lua: lease a batch of finished trajectories to the value worker.
--
-- Reads    spec epochs
-- Writes   finished finished_claims finished_claim:<id> finished:*
-- ARGV[4]  how many   ARGV[5] id for the new claim; a repeat of an id gets what is left of the same claim again
-- Returns  { 1, trajectory, ... } or, when there are fewer, { 0, how many there are }

local wanted, id = tonumber(ARGV[4]), ARGV[5]
if not S.value_training then return redis.error_reply('UNKEPT this run keeps no finished trajectories') end
local claim_key, reply = P .. 'finished_claim:' .. id, { 1 }
if call('SISMEMBER', P .. 'finished_claims', id) == 1 then
  for _, tid in ipairs(call('ZRANGE', claim_key, 0, -1)) do reply[#reply + 1] = tid end
  return reply
end

local there = call('ZCARD', P .. 'finished')
if there < wanted then return { 0, there } end
allow_growth()
local taken = call('ZRANGE', P .. 'finished', 0, wanted - 1, 'WITHSCORES')
for i = 1, #taken, 2 do
  local tid = taken[i]
  call('ZREM', P .. 'finished', tid)
  call('ZADD', claim_key, taken[i + 1], tid)
  call('HSET', finished_key(tid), 'claim', id)
  reply[#reply + 1] = tid
end
call('SADD', P .. 'finished_claims', id)
return reply
