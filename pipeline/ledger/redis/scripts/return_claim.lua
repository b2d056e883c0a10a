-- return_claim.lua: make a claim's units ready again, one batch per call. The claim exists until its last
-- unit is ready: if the learner dies between two calls, its successor's recover does the rest.
--
-- Uses     beginning ready requests
-- Writes   claims claim:<id> ready ready_age asked:<who>, the units' state
-- ARGV[4]  request  integer  its number
-- ARGV[5]  most     integer  units to make ready
-- ARGV[6]  id       text
-- Returns  { how many units are ready again, 1 to call again or 0 }; 0 units when there is no such claim

local request, most, id = ARGV[4], tonumber(ARGV[5]), ARGV[6]
local order = order_of('return_claim', request)
if order == 'late' then return LATE end
if order == 'again' then return remembered('return_claim:returned', 'return_claim:more') end
allow_growth()
local returned, more, key = 0, 0, P .. 'claim:' .. id
if call('HEXISTS', P .. 'claims', id) == 1 then
  local units = call('ZRANGE', key, 0, most - 1, 'WITHSCORES')
  for i = 1, #units, 2 do
    make_ready(units[i], units[i + 1], call('HGET', unit_key(units[i]), 'oldest'))
    call('ZREM', key, units[i])
    returned = returned + 1
  end
  more = call('EXISTS', key)
  if more == 0 then call('HDEL', P .. 'claims', id) end
end
remember('return_claim', request, 'return_claim:returned', returned, 'return_claim:more', more)
return { returned, more }
