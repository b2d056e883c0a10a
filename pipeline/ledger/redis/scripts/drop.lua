-- drop.lua: drop one unit out of a claim; its credit returns.
--
-- Uses     beginning leaving versions
-- Writes   claim:<id> counters tallies, and all that the unit leaves behind
-- ARGV[4]  id       text     of the claim
-- ARGV[5]  unit     text
-- ARGV[6]  reason   text
-- Returns  1, or 0 when the claim does not hold the unit (any more)

local id, unit, reason = ARGV[4], ARGV[5], ARGV[6]
if not call('ZSCORE', P .. 'claim:' .. id, unit) then return 0 end
allow_growth()
call('ZREM', P .. 'claim:' .. id, unit)
leaving().unit(unit, reason, updates_in(tonumber(call('HGET', P .. 'claims', id))))
return 1
