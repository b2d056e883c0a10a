-- return_claim.lua: return a claim's units to ready.
--
-- Uses     beginning ready
-- Writes   claims claim:<id> ready ready_age, the units' state
-- ARGV[4]  id  text
-- Returns  how many units came back; 0 when the claim is not there

local id = ARGV[4]
allow_growth()
if call('HDEL', P .. 'claims', id) == 0 then return 0 end
local units = call('ZRANGE', P .. 'claim:' .. id, 0, -1, 'WITHSCORES')
for i = 1, #units, 2 do make_ready(units[i], units[i + 1], call('HGET', unit_key(units[i]), 'oldest')) end
call('DEL', P .. 'claim:' .. id)
return #units / 2
