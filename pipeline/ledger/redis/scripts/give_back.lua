-- give_back.lua: reopen held trajectories at once.
--
-- Uses     beginning reopening requests
-- Writes   held:<who> asked:<who> trajectory:* open evaluation_open running_age
-- ARGV[4]  request  integer  its number
-- ARGV[5]  are_all  flag     reopen everything that the caller holds
-- ARGV[6..]  trajectories  text  otherwise these; those that the caller does not hold are skipped
-- Returns  how many were reopened

local request, are_all = ARGV[4], ARGV[5] == '1'
local order = order_of('give_back', request)
if order == 'late' then return LATE end
if order == 'again' then return integer(call('HGET', ASKED, 'give_back:opened')) end
allow_growth()
local opened = 0
if are_all then opened = reopen_all(WHO) end
for i = 6, #ARGV do
  if call('SISMEMBER', P .. 'held:' .. WHO, ARGV[i]) == 1 then
    reopen(ARGV[i], WHO)
    opened = opened + 1
  end
end
remember('give_back', request, 'give_back:opened', opened)
return opened
