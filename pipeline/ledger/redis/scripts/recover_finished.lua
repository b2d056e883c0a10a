-- recover_finished.lua: settle the value batches in a checkpoint, keep a snapshot's, and let the
-- trajectories of all other claims wait again.
--
-- Uses     beginning counts leaving names requests
-- Writes   finished finished_claims finished_claim:* finished:* counters asked:<who>
-- ARGV[4]  request  integer  its number
-- ARGV[5]  kept     integer  how many of the claims stay claimed: the first ones
-- ARGV[6..]  claims  text  those whose effect is in the snapshot, then those in the checkpoint
-- Returns  how many trajectories wait again

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
