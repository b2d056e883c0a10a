-- write_chunk.lua: store a chunk once, index it for its scorers, and say whether its writer may go on.
--
-- Reads    spec counters epochs
-- Writes   chunk:<id> trajectory:<id> group:<n> due:* running running_age ready ready_age parked held:<who> holders
-- ARGV[4]  trajectory   ARGV[5] index   ARGV[6] '1' when final   ARGV[7] tokens   ARGV[8] versions, ascending   ARGV[9] blob
-- Returns  { 'stored' | 'duplicate' | 'fenced', 1 when the writer may extend the trajectory at once else 0 }
-- Without memory the first write is refused and nothing has changed.

local tid, index, final = ARGV[4], tonumber(ARGV[5]), ARGV[6] == '1'
local tokens, blob = tonumber(ARGV[7]), ARGV[9]
-- units are dated in updates, of which a newer version may have fewer; evaluation is told in versions
local oldest, newest = math.huge, 0
for version in string.gmatch(ARGV[8], '%d+') do
  newest = tonumber(version)
  oldest = math.min(oldest, is_evaluation(tid) and newest or updates_in(newest))
end
local tkey, cid = trajectory_key(tid), chunk_id(tid, index)
local ckey = chunk_key(cid)

local t = call('HMGET', tkey, 'next', 'holder', 'oldest', 'newest')
if not t[1] then return { 'fenced', 0 } end
local next_index, holds = tonumber(t[1]), t[2] == WHO
if index < next_index then
  -- Only the very same bytes are a repeat; anything else was sampled by someone who had lost the trajectory.
  local there = call('HGET', ckey, 'blob') or (index == next_index - 1 and call('HGET', tkey, 'last'))
  if there == blob or (not there and holds) then return { 'duplicate', holds and 1 or 0 } end
  return { 'fenced', 0 }
end
if index > next_index or not holds then return { 'fenced', 0 } end

call('HSET', ckey, 'blob', blob, 'tokens', tokens, 'oldest', oldest, 'written_s', string.format('%.17g', now))
if final then call('HSET', ckey, 'final', 1) end
count('bytes', #blob + CHUNK_OVERHEAD)
call('HINCRBY', tkey, 'tokens', tokens)
call('HSET', tkey, 'next', index + 1, 'oldest', math.min(oldest, tonumber(t[3] or oldest)),
  'newest', math.max(newest, tonumber(t[4] or newest)), 'since', string.format('%.17g', now))
touch(WHO)
count('stored:' .. WHO, tokens)
if final then
  call('HSET', tkey, 'final', 1)
  let_go(tid, WHO)
end

if is_evaluation(tid) then
  if index > 0 then forget_chunk(chunk_id(tid, index - 1)) end
  if final then call('ZADD', P .. 'due:reward', now + S.scoring_deadline_s, cid) end
  return { 'stored', final and 0 or 1 }
end

count('tokens:admitted', tokens)
local missing = 0
for _, field in ipairs(FIELDS) do
  if is_needed(field, final) then
    missing = missing + 1
    call('ZADD', P .. 'due:' .. field, now + S.scoring_deadline_s, cid)
  end
end

if S.unit == 'group' then
  local _, group = parts(tid)
  local gkey = group_key(group)
  call('HINCRBY', gkey, 'missing', missing)
  call('HSET', gkey, 'oldest', math.min(oldest, tonumber(call('HGET', gkey, 'oldest') or oldest)))
  call('ZADD', P .. 'running_age', 'LT', oldest, string.format('%d', group))
  if final then call('HINCRBY', gkey, 'finals', 1) end
  ready_if_complete(tid, index)
  return { 'stored', final and 0 or 1 }
end
if S.unit == 'trajectory' then
  call('HINCRBY', tkey, 'missing', missing)
  call('ZADD', P .. 'running_age', math.min(oldest, tonumber(t[3] or oldest)), tid)
  ready_if_complete(tid, index)
  return { 'stored', final and 0 or 1 }
end

call('HSET', ckey, 'missing', missing)
call('HINCRBY', tkey, 'live', 1)
count('bytes', -call('HSTRLEN', tkey, 'last'))
call('HDEL', tkey, 'last')
call('ZADD', P .. 'running_age', oldest, cid)
ready_if_complete(tid, index)
if final then return { 'stored', 0 } end
if newest < counter('version') or refusal(1) then
  let_go(tid, WHO)
  call('ZADD', P .. 'parked', trajectory_order(tid), tid)
  return { 'stored', 0 }
end
run_unit(chunk_id(tid, index + 1), chunk_order(tid, index + 1))
begin_age(tid, index + 1)
count('used', 1)
return { 'stored', 1 }
