-- drop.lua: drop one unit out of a claim; its credit returns.
--
-- Writes   claim:<id> counters, and all that the unit leaves behind
-- ARGV[4]  claim   ARGV[5] unit   ARGV[6] reason
-- Returns  1, or 0 when the claim does not hold the unit (any more)

if not call('ZSCORE', P .. 'claim:' .. ARGV[4], ARGV[5]) then return 0 end
allow_growth()
call('ZREM', P .. 'claim:' .. ARGV[4], ARGV[5])
leaving().unit(ARGV[5], ARGV[6])
return 1
