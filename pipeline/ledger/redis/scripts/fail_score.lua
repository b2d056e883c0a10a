-- fail_score.lua: count a scorer's failure on a chunk; after the last attempt drop its unit as a dead letter.
--
-- Writes   chunk:<id> due:<field> dead evaluation:<n> counters asked:<who>, and all that a dropped unit leaves behind
-- ARGV[4]  chunk   ARGV[5] field   ARGV[6] traceback   ARGV[7] number of this failure; each counts once
-- Returns  1 when the unit was dropped, else 0. A chunk that is gone, or has the field by now, changes nothing.

local cid, field = ARGV[4], ARGV[5]
local tid, index = chunk_parts(cid)
local ckey = chunk_key(cid)
if not call('ZSCORE', P .. 'due:' .. field, cid) then
  return call('HGET', ASKED, 'buried') == cid .. ' ' .. ARGV[7] and 1 or 0
end
local failure = 'failed:' .. field .. ':' .. WHO .. ':' .. ARGV[7]
if call('HEXISTS', ckey, failure) == 1 then return 0 end
allow_growth()
call('HSET', ckey, failure, 1)
local attempts = call('HINCRBY', ckey, 'attempts:' .. field, 1)
if attempts < S.max_attempts then
  call('ZADD', P .. 'due:' .. field, now, cid)
  return 0
end
local lane, group = parts(tid)
local prompt = is_evaluation(tid) and group or prompt_of(group)
call('LPUSH', P .. 'dead', cmsgpack.pack({ cid, field, WHO, ARGV[6], attempts, string.format('%.17g', now), prompt }))
call('LTRIM', P .. 'dead', 0, 999)
remember('buried', cid .. ' ' .. ARGV[7])
if is_evaluation(tid) then
  call('HINCRBY', P .. 'evaluation:' .. string.sub(lane, 2), 'failed', 1)
  leaving().evaluation(tid, index)
  return 1
end
if S.unit == 'group' then
  leaving().unit(string.format('%d', group), 'dead_letter')
elseif S.unit == 'trajectory' then
  leaving().unit(tid, 'dead_letter')
else
  leaving().unit(cid, 'dead_letter')
end
return 1
