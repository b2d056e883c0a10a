-- recover_finished.lua: forget the value batches that a checkpoint holds, and let every other
-- claim's trajectories wait again.
--
-- Uses     beginning counts leaving names requests
-- Writes   finished finished_claims finished_claim:* finished:* counters asked:<who>
-- ARGV[4]  request  integer  its number
-- ARGV[5..]  claims  text  whose effect the checkpoint holds
-- Returns  how many trajectories came back

local request = ARGV[4]
local order = order_of('recover_finished', request)
if order == 'late' then return LATE end
if order == 'again' then return integer(call('HGET', ASKED, 'recover_finished:returned')) end
allow_growth()
local applied, returned = {}, 0
for i = 5, #ARGV do applied[ARGV[i]] = true end
for _, id in ipairs(call('SMEMBERS', P .. 'finished_claims')) do
  local names = call('ZRANGE', P .. 'finished_claim:' .. id, 0, -1, 'WITHSCORES')
  for i = 1, #names, 2 do
    if applied[id] then
      leaving().forget_finished(names[i])
      count('finished:trained', 1)
    else
      call('ZADD', P .. 'finished', names[i + 1], names[i])
      call('HDEL', finished_key(names[i]), 'claim')
      returned = returned + 1
    end
  end
  call('DEL', P .. 'finished_claim:' .. id)
end
call('DEL', P .. 'finished_claims')
remember('recover_finished', request, 'recover_finished:returned', returned)
return returned
