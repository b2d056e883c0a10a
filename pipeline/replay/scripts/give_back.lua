-- give_back.lua: open held trajectories for others at once.
--
-- Writes   held:<who> trajectory:* open evaluation_open running_age
-- ARGV[4]  'all', or 'some' with the trajectories in ARGV[5..]; those that the caller does not hold are passed over
-- Returns  how many were opened

allow_growth()
if ARGV[4] == 'all' then return reopen_all(WHO) end
local opened = 0
for i = 5, #ARGV do
  if call('SISMEMBER', P .. 'held:' .. WHO, ARGV[i]) == 1 then
    reopen(ARGV[i], WHO)
    opened = opened + 1
  end
end
return opened
