-- drop.lua: drop one unit from a claim; its credit returns. With a chunk, also record a dead letter.
--
-- Uses     beginning leaving names prompts versions
-- Writes   claim:<id> dead counters tallies, and what dropping a unit writes
-- ARGV[4]  id       text     of the claim
-- ARGV[5]  unit     text
-- ARGV[6]  reason   text
-- ARGV[7]  chunk    text     names the dead letter; empty for none
-- ARGV[8]  role     text     of the caller
-- ARGV[9]  error    bytes
-- Returns  1, or 0 when the claim does not (or no longer) hold the unit

local id, unit, reason = ARGV[4], ARGV[5], ARGV[6]
local chunk, role, error = ARGV[7], ARGV[8], ARGV[9]
if not call('ZSCORE', P .. 'claim:' .. id, unit) then return 0 end
allow_growth()
call('ZREM', P .. 'claim:' .. id, unit)
if chunk ~= '' then
  local _, group = parts((chunk_parts(chunk)))
  call('LPUSH', P .. 'dead', cmsgpack.pack({ chunk, role, WHO, error, 1, now_text, prompt_of(group) }))
  call('LTRIM', P .. 'dead', 0, 999)
end
leaving().unit(unit, reason, updates_in(tonumber(call('HGET', P .. 'claims', id))))
return 1
