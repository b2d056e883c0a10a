-- claim_finished.lua: lease a batch of finished trajectories to the value worker.
--
-- Uses     beginning counts names requests
-- Reads    settings epochs
-- Writes   finished finished_claims finished_claim:<id> finished:* moved asked:<who>
-- ARGV[4]  wanted   integer  how many
-- ARGV[5]  request  integer  its number; a repeat gets what is left of the same claim
-- ARGV[6]  id       text     for the new claim
-- Returns  { 1, trajectory, ... } or, when there are fewer, { 0, how many there are }

local wanted, request, id = tonumber(ARGV[4]), ARGV[5], ARGV[6]
if not S.value_training then return redis.error_reply('UNKEPT this run keeps no finished trajectories') end
local claim_key, reply = P .. 'finished_claim:' .. id, { 1 }
local order = order_of('claim_finished', request)
if order == 'late' then return LATE end
if order == 'again' and call('HGET', ASKED, 'claim_finished:given') == '1' then
  if call('SISMEMBER', P .. 'finished_claims', id) == 0 then return LATE end
  for _, tid in ipairs(call('ZRANGE', claim_key, 0, -1)) do reply[#reply + 1] = tid end
  return reply
end

if order == 'again' then return { 0, integer(call('HGET', ASKED, 'claim_finished:there')) } end
allow_growth()
local there = call('ZCARD', P .. 'finished')
local given = there < wanted and 0 or 1
remember('claim_finished', request, 'claim_finished:given', given, 'claim_finished:there', there)
if there < wanted then return { 0, there } end
local taken = call('ZRANGE', P .. 'finished', 0, wanted - 1, 'WITHSCORES')
for i = 1, #taken, 2 do
  local tid = taken[i]
  call('ZREM', P .. 'finished', tid)
  call('ZADD', claim_key, taken[i + 1], tid)
  call('HSET', finished_key(tid), 'claim', id)
  has_moved(tid)
  reply[#reply + 1] = tid
end
call('SADD', P .. 'finished_claims', id)
return reply
