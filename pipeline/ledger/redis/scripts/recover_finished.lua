-- recover_finished.lua: forget the value batches that a checkpoint holds, keep a snapshot's, and
-- let every other claim's trajectories wait again.
--
-- Uses     beginning counts leaving names requests
-- Writes   finished finished_claims finished_claim:* finished:* counters asked:<who>
-- ARGV[4]  request  integer  its number
-- ARGV[5]  kept     integer  how many of the claims stay claimed: the first ones
-- ARGV[6..]  claims  text  whose effect the snapshot, then those whose effect the checkpoint holds
-- Returns  how many trajectories came back

local request, kept = ARGV[4], tonumber(ARGV[5])
local order = order_of('recover_finished', request)
if order == 'late' then return LATE end
if order == 'again' then return integer(call('HGET', ASKED, 'recover_finished:returned')) end
allow_growth()
local stays, applied, returned = {}, {}, 0
for i = 6, #ARGV do
  if i < 6 + kept then stays[ARGV[i]] = true else applied[ARGV[i]] = true end
end
for _, id in ipairs(call('SMEMBERS', P .. 'finished_claims')) do
  if applied[id] or not stays[id] then
    local names = call('ZRANGE', P .. 'finished_claim:' .. id, 0, -1, 'WITHSCORES')
    for i = 1, #names, 2 do
      if applied[id] then
        leaving().forget_finished(names[i])
        count('finished:trained', 1)
      else
        call('ZADD', P .. 'finished', names[i + 1], names[i])
        call('HDEL', finished_key(names[i]), 'claim')
        has_moved(names[i])
        returned = returned + 1
      end
    end
    call('DEL', P .. 'finished_claim:' .. id)
    call('SREM', P .. 'finished_claims', id)
  end
end
remember('recover_finished', request, 'recover_finished:returned', returned)
return returned
