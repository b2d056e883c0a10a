-- write_score.lua: fill a field of a chunk once; the write that completes a unit makes it ready, or drops it without signal.
--
-- Reads    spec epochs
-- Writes   chunk:<id> trajectory:<id> group:<n> due:<field> running running_age ready ready_age counters
--          evaluation:<n>:samples, and all that a dropped group leaves behind
-- ARGV[4]  chunk   ARGV[5] field   ARGV[6] blob   ARGV[7], ARGV[8] for a reward: accuracy and reward as text, else ''
-- Returns  'stored' | 'duplicate' | 'unknown'

local cid, field, blob, accuracy = ARGV[4], ARGV[5], ARGV[6], ARGV[7]
local tid, index = chunk_parts(cid)
local ckey, tkey = chunk_key(cid), trajectory_key(tid)
local c = call('HMGET', ckey, 'tokens', 'final', field)
if not c[1] then return 'unknown' end
if c[3] then return 'duplicate' end
local final = c[2] and true or false

if is_evaluation(tid) then
  if field ~= 'reward' or not final then return 'unknown' end
  allow_growth()
  local lane, prompt, sample = parts(tid)
  local t = call('HMGET', tkey, 'tokens', 'oldest', 'newest')
  call('HSET', P .. 'evaluation:' .. string.sub(lane, 2) .. ':samples',
    string.format('%d.%d', prompt, sample), table.concat({ accuracy, ARGV[8], t[1], t[2], t[3] }, ' '))
  end_evaluation(tid, index)
  return 'stored'
end

if not is_needed(field, final) then return 'unknown' end
allow_growth()
call('HSET', ckey, field, blob)
count('bytes', #blob)
call('ZREM', P .. 'due:' .. field, cid)

if S.unit == 'group' then
  local _, group = parts(tid)
  local gkey = group_key(group)
  call('HINCRBY', gkey, 'missing', -1)
  if field == 'reward' then
    if call('HSETNX', gkey, 'accuracy', accuracy) == 0 and call('HGET', gkey, 'accuracy') ~= accuracy then
      call('HSET', gkey, 'mixed', 1)
    end
    if call('HINCRBY', gkey, 'scored', 1) == S.group_size and S.signal_filter and not call('HGET', gkey, 'mixed') then
      end_unit(string.format('%d', group), 'no_signal')
      return 'stored'
    end
  end
elseif S.unit == 'trajectory' then
  call('HINCRBY', tkey, 'missing', -1)
else
  call('HINCRBY', ckey, 'missing', -1)
end
ready_if_complete(tid, index)
return 'stored'
