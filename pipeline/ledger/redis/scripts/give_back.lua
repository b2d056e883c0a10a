-- give_back.lua: open held trajectories for others at once.
--
-- Writes   held:<who> asked:<who> trajectory:* open evaluation_open running_age
-- ARGV[4]  number of this request
-- ARGV[5]  'all', or 'some' with the trajectories in ARGV[6..]; those that the caller does not hold are passed over
-- Returns  how many were opened

local order = order_of('give_back', ARGV[4])
if order == 'late' then return LATE end
if order == 'again' then return integer(call('HGET', ASKED, 'give_back:opened')) end
allow_growth()
local opened = 0
if ARGV[5] == 'all' then opened = reopen_all(WHO) end
for i = 6, #ARGV do
  if call('SISMEMBER', P .. 'held:' .. WHO, ARGV[i]) == 1 then
    reopen(ARGV[i], WHO)
    opened = opened + 1
  end
end
remember('give_back', ARGV[4], 'give_back:opened', opened)
return opened
