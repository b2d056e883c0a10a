-- expire_scoring.lua: make chunks due at once because their scorer is lost.
--
-- Uses     beginning requests
-- Writes   due:<field> asked:<who>
-- ARGV[4]  field    text
-- ARGV[5]  request  integer  its number
-- ARGV[6..]  chunks  text
-- Returns  how many lacked the field and were not due before

local field, request = ARGV[4], ARGV[5]
local key, num_due = P .. 'due:' .. field, 0
local order = order_of('expire', request)
if order == 'late' then return LATE end
if order == 'again' then return integer(call('HGET', ASKED, 'expire:due')) end
allow_growth()
for i = 6, #ARGV do
  local until_s = call('ZSCORE', key, ARGV[i])
  if until_s and tonumber(until_s) > now then
    call('ZADD', key, now, ARGV[i])
    num_due = num_due + 1
  end
end
remember('expire', request, 'expire:due', num_due)
return num_due
