-- spend.lua: spend one of the run's `limit` uses of something, such as requests to an endpoint.
--
-- Uses     beginning requests
-- Writes   counters asked:<who>
-- ARGV[4]  what     text     name of what is spent
-- ARGV[5]  limit    integer  how many there are
-- ARGV[6]  request  integer  its number
-- Returns  1 when one was left, else 0

local what, limit, request = ARGV[4], tonumber(ARGV[5]), ARGV[6]
local order = order_of('spend', request)
if order == 'late' then return LATE end
if order == 'again' then return integer(call('HGET', ASKED, 'spend:given')) end
allow_growth()
local given = 0
if integer(call('HGET', COUNTERS, 'spent:' .. what)) < limit then
  call('HINCRBY', COUNTERS, 'spent:' .. what, 1)
  given = 1
end
remember('spend', request, 'spend:given', given)
return given
