-- write_turn.lua: write the environment's answer to a turn once. Its trajectory is open again, or has ended,
-- and then waits for its verdict.
--
-- Uses     beginning counts names ready
-- Reads    settings epochs
-- Writes   chunk:<id> trajectory:<id> group:<n> due:turn due:reward open parked evaluation_open running
--          running_age ready ready_age counters, and what dropping a unit writes
-- ARGV[4]  chunk    text
-- ARGV[5]  blob     bytes
-- ARGV[6]  is_done  flag   the trajectory has ended
-- Returns  'stored' | 'duplicate' | 'unknown'

local chunk, blob, is_done = ARGV[4], ARGV[5], ARGV[6] == '1'
local tid, index = chunk_parts(chunk)
local ckey, tkey = chunk_key(chunk), trajectory_key(tid)
local c = call('HMGET', ckey, 'tokens', 'turn', 'bytes')
if not c[1] then return 'unknown' end
if c[2] then return 'duplicate' end
-- a chunk that is not due has no answer, for good; ZREM is never refused for lack of memory, so the rest
-- passes too
if call('ZREM', P .. 'due:turn', chunk) == 0 then return 'unknown' end
local from = string.gsub(WHO, '[\t\n]', ' ') .. ' ' .. now_text
call('HSET', ckey, 'turn', blob, 'bytes', integer(c[3]) + #blob, 'from:turn', from)
count('bytes', #blob)
call('HDEL', tkey, 'state')
call('HSET', tkey, 'since', now_text)

local added = -1
if is_done then
  call('HSET', ckey, 'final', 1, 'turned_s', now_text)
  call('HSET', tkey, 'final', 1)
  -- a verdict on no tokens is only of use to the other members of a group
  if c[1] ~= '0' or S.unit == 'group' or is_evaluation(tid) then
    call('ZADD', P .. 'due:reward', now, chunk)
    added = HAS_GUIDANCE and 1 or 0
  end
else
  local queue = is_evaluation(tid) and 'evaluation_open' or (S.unit == 'chunk' and 'parked' or 'open')
  call('ZADD', P .. queue, trajectory_order(tid), tid)
end
if is_evaluation(tid) then return 'stored' end

local unit = ckey
if S.unit == 'group' then
  unit = group_key(string.match(tid, '^t%.(%d+)'))
  if is_done then call('HINCRBY', unit, 'finals', 1) end
elseif S.unit == 'trajectory' then
  unit = tkey
end
if call('HINCRBY', unit, 'missing', added) == 0 then ready_if_sampled(tid, index) end
return 'stored'
