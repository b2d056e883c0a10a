-- fail_score.lua: count a scorer's failure on a chunk; after the last attempt it is a dead letter, and
-- its unit is dropped. A group with enough other members goes on without a reward for this one, also when
-- its environment fails.
--
-- Uses     beginning leaving names prompts ready requests
-- Writes   chunk:<id> trajectory:<id> group:<n> due:<field> dead evaluation:<n> counters asked:<who>, and
--          what dropping a unit writes
-- ARGV[4]  chunk      text
-- ARGV[5]  field      text
-- ARGV[6]  traceback  bytes
-- ARGV[7]  request    integer  number of this failure; each counts once
-- Returns  1 when the chunk is a dead letter, else 0. Nothing changes if the chunk is gone or has the field.

local chunk, field, traceback, request = ARGV[4], ARGV[5], ARGV[6], ARGV[7]
local tid, index = chunk_parts(chunk)
local ckey = chunk_key(chunk)
if not call('ZSCORE', P .. 'due:' .. field, chunk) then
  return call('HGET', ASKED, 'buried') == chunk .. ' ' .. request and 1 or 0
end
local failure = 'failed:' .. field .. ':' .. WHO .. ':' .. request
if call('HEXISTS', ckey, failure) == 1 then return 0 end
allow_growth()
call('HSET', ckey, failure, 1)
local attempts = call('HINCRBY', ckey, 'attempts:' .. field, 1)
local lane, group = parts(tid)
local gkey = group_key(group)
-- a group that failed may be judged again at once, unless another scorer has it now
if not is_evaluation(tid) and call('HGET', gkey, 'judged_by') == WHO then
  call('HDEL', gkey, 'judged_by', 'judged_until')
end
if attempts < S.max_attempts then
  call('ZADD', P .. 'due:' .. field, now, chunk)
  return 0
end
local prompt = is_evaluation(tid) and group or prompt_of(group)
call('LPUSH', P .. 'dead', cmsgpack.pack({ chunk, field, WHO, traceback, attempts, now_text, prompt }))
call('LTRIM', P .. 'dead', 0, 999)
remember('buried', chunk .. ' ' .. request)
if is_evaluation(tid) then
  call('HINCRBY', P .. 'evaluation:' .. string.sub(lane, 2), 'failed', 1)
  leaving().evaluation(tid, index)
  return 1
end
if S.unit == 'group' and (field == 'reward' or field == 'turn') then
  local g = call('HMGET', gkey, 'unjudged', 'scored', 'mixed')
  local unjudged = integer(g[1]) + 1
  if S.group_size - unjudged >= math.min(2, S.group_size) then
    call('HSET', gkey, 'unjudged', unjudged)
    call('HSET', trajectory_key(tid), 'unjudged', 1, 'final', 1)
    call('ZREM', P .. 'due:' .. field, chunk)
    if field == 'turn' then -- the trajectory is over, though none of its chunks is the last one
      call('HDEL', trajectory_key(tid), 'state')
      call('HINCRBY', gkey, 'finals', 1)
    end
    if S.value_training then leaving().spoil_trajectory(tid, 'dead_letter') end
    -- no guidance either, since that follows a reward
    local missing = call('HINCRBY', gkey, 'missing', field == 'reward' and HAS_GUIDANCE and -2 or -1)
    local is_alike = S.signal_filter and integer(g[2]) + unjudged >= S.group_size and not g[3]
    if not S.value_training and (is_alike or is_all_masked(group)) then
      leaving().unit(string.format('%d', group), 'no_signal')
    elseif missing == 0 then
      ready_if_sampled(tid, index)
    end
    return 1
  end
end
if S.unit == 'group' then
  leaving().unit(string.format('%d', group), 'dead_letter')
elseif S.unit == 'trajectory' then
  leaving().unit(tid, 'dead_letter')
else
  leaving().unit(chunk, 'dead_letter')
end
return 1
