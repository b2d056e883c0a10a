-- write_score.lua: write a field of a chunk once. The write that completes a unit makes it ready, or drops
-- it for lack of signal. write_turn.lua writes turns.
--
-- Uses     beginning counts leaving names ready showing
-- Reads    settings epochs
-- Writes   chunk:<id> trajectory:<id> group:<n> due:<field> running running_age ready ready_age
--          counters finished:<id> finished evaluation:<n>:samples, and what dropping a unit writes
-- ARGV[4]  chunk     text
-- ARGV[5]  field     text
-- ARGV[6]  blob      bytes
-- ARGV[7]  accuracy  text   of a reward, else ''
-- ARGV[8]  reward    text   of a reward, else ''
-- ARGV[9]  is_masked flag   of a reward: whether its response is masked
-- Returns  'stored' | 'duplicate' | 'unknown'

local chunk, field, blob, accuracy, reward = ARGV[4], ARGV[5], ARGV[6], ARGV[7], ARGV[8]
local is_masked = ARGV[9] == '1'
local tid, index = chunk_parts(chunk)
local ckey, tkey = chunk_key(chunk), trajectory_key(tid)
local c = call('HMGET', ckey, 'tokens', 'final', field, 'bytes')
if not c[1] then return 'unknown' end
if c[3] then return 'duplicate' end
local final = c[2] and true or false

if is_evaluation(tid) then
  if field ~= 'reward' or not final then return 'unknown' end
  allow_growth()
  local lane, prompt, sample = parts(tid)
  local t = call('HMGET', tkey, 'tokens', 'oldest', 'newest')
  call('HSET', P .. 'evaluation:' .. string.sub(lane, 2) .. ':samples',
    string.format('%d.%d', prompt, sample), table.concat({ accuracy, reward, t[1], integer(t[2]), integer(t[3]) }, ' '))
  if tonumber(sample) == 0 then show('evaluation', call('HGET', ckey, 'blob'), blob) end
  leaving().evaluation(tid, index)
  return 'stored'
end

if not is_needed(field, final) then return 'unknown' end
if field == 'guidance' and call('HEXISTS', ckey, 'reward') == 0 then return 'unknown' end
-- a chunk that is not due has no verdict, for good; ZREM is never refused for lack of memory, so the rest
-- passes too
if call('ZREM', P .. 'due:' .. field, chunk) == 0 then return 'unknown' end
local from = WHO .. ' ' .. now_text .. ' ' .. accuracy .. ' ' .. reward
if string.find(from, '\t', 1, true) or string.find(from, '\n', 1, true) then from = string.gsub(from, '[\t\n]', ' ') end
call('HSET', ckey, field, blob, 'bytes', integer(c[4]) + #blob, 'from:' .. field, from)
count('bytes', #blob)
if field == 'reward' and HAS_GUIDANCE then
  call('HSET', ckey, 'rewarded_s', now_text)
  call('ZADD', P .. 'due:guidance', now, chunk)
end

-- Keep what the value worker trains on separately from the chunk, which may leave before its trajectory is
-- finished. An opening chunk has no tokens, and no values.
local keeps = S.value_training and (field == 'reward' or field == 'value') and c[1] ~= '0'
local t = keeps and call('HMGET', tkey, 'spoiled', 'opening')
if t and not t[1] then
  local key = finished_key(tid)
  local grown = #blob + (call('EXISTS', key) == 0 and CHUNK_OVERHEAD or 0)
  if field == 'value' then
    call('HSET', key, 'value:' .. string.format('%d', index), blob)
    call('HINCRBY', key, 'num_values', 1)
  else
    local last = call('HGET', ckey, 'blob')
    call('HSET', key, 'final', last, 'reward', blob, 'num_chunks', index + 1 - integer(t[2]))
    grown = grown + #last
  end
  call('HINCRBY', key, 'bytes', grown)
  count('bytes', grown)
  local f = call('HMGET', key, 'num_chunks', 'num_values')
  if f[1] and tonumber(f[1]) == integer(f[2]) then
    call('HSET', key, 'state', 'complete', 'ready_s', now_text)
    call('ZADD', P .. 'finished', trajectory_order(tid), tid)
    count('finished:admitted', 1)
    has_moved(tid)
  end
end

local group = string.match(tid, '^t%.(%d+)')
local gkey = group_key(group)
local unit = S.unit == 'group' and group or (S.unit == 'trajectory' and tid or chunk)
local missing, is_without_signal
if field == 'reward' then
  if is_masked then call('HINCRBY', unit_key(unit), 'masked', 1) end
  local g = call('HMGET', gkey, 'scored', 'correct', 'accuracy', 'mixed', 'missing', 'unjudged')
  local scored = integer(g[1]) + 1
  -- with room for what may be appended
  local change = { 'scored', scored, 'accuracy', g[3] or accuracy, nil, nil, nil, nil, nil, nil }
  -- not for a group that an earlier release began to score: its sum would be too small
  if g[2] or not g[1] then
    local value = tonumber(accuracy)
    -- anything but a number counts as wrong
    local in_range = value and value == value and math.min(math.max(value, 0), 1) or 0
    change[5], change[6] = 'correct', integer(g[2]) + math.floor(in_range * 1000000 + 0.5)
  end
  local is_mixed = g[4] or (g[3] and g[3] ~= accuracy)
  if is_mixed and not g[4] then
    change[#change + 1] = 'mixed'
    change[#change + 1] = 1
  end
  if S.unit == 'group' then
    missing = integer(g[5]) - 1
    change[#change + 1] = 'missing'
    change[#change + 1] = missing
    is_without_signal = S.signal_filter and scored + integer(g[6]) >= S.group_size and not is_mixed
  end
  call('HSET', gkey, unpack(change))
  is_without_signal = is_without_signal or (is_masked and is_all_masked(unit))
  -- a critic also learns from units without signal, so dropping them waits for all their values
  if is_without_signal and not S.value_training then
    leaving().unit(unit, 'no_signal')
    return 'stored'
  end
end
if S.unit == 'group' then
  missing = missing or call('HINCRBY', gkey, 'missing', -1)
elseif S.unit == 'trajectory' then
  missing = call('HINCRBY', tkey, 'missing', -1)
else
  missing = call('HINCRBY', ckey, 'missing', -1)
end
if missing == 0 then ready_if_sampled(tid, index) end
return 'stored'
