-- write_chunk.lua: store a chunk once, index it for its scorers, and say whether its writer may continue.
--
-- Uses     beginning counts credit holding leaving names ready versions
-- Reads    settings counters epochs
-- Writes   chunk:<id> trajectory:<id> group:<n> due:* running running_age ready ready_age parked
--          held:<who> holders moved
-- ARGV[4]  trajectory  text
-- ARGV[5]  index       integer
-- ARGV[6]  final       flag
-- ARGV[7]  ends_turn   flag     the environment answers, and says whether the trajectory goes on
-- ARGV[8]  tokens      integer  0 in an opening chunk, which ends a turn
-- ARGV[9]  versions    text     ascending, with spaces between them
-- ARGV[10]  blob       bytes
-- Returns  { 'stored' | 'duplicate' | 'fenced', 1 when the writer may extend the trajectory at once
--          else 0 }
-- Without memory, the first write is refused and nothing has changed.

local trajectory, index, final, ends_turn = ARGV[4], tonumber(ARGV[5]), ARGV[6] == '1', ARGV[7] == '1'
local tokens, versions, blob = tonumber(ARGV[8]), ARGV[9], ARGV[10]
local keeps = (final or ends_turn) and 0 or 1
local is_training = not is_evaluation(trajectory)
-- units are dated in updates, of which a newer version may have fewer; evaluations in versions
local oldest, newest = math.huge, 0
for version in string.gmatch(versions, '%d+') do
  newest = tonumber(version)
  oldest = math.min(oldest, is_training and updates_in(newest) or newest)
end
local tkey, cid = trajectory_key(trajectory), chunk_id(trajectory, index)
local ckey = chunk_key(cid)

local t = call('HMGET', tkey, 'next', 'holder', 'oldest', 'newest', 'tokens', 'missing', 'live')
if not t[1] then return { 'fenced', 0 } end
local next_index, holds = tonumber(t[1]), t[2] == WHO
if index < next_index then
  -- only identical bytes are a repeat; others come from a writer that had lost the trajectory
  local there = call('HGET', ckey, 'blob') or (index == next_index - 1 and call('HGET', tkey, 'last'))
  if there == blob or (not there and holds) then return { 'duplicate', holds and 1 or 0 } end
  return { 'fenced', 0 }
end
if index > next_index or not holds then return { 'fenced', 0 } end

local needed = {}
if is_training then
  for _, field in ipairs(FIELDS) do
    if is_needed(field, final, ends_turn) and (tokens > 0 or field == 'turn') then needed[#needed + 1] = field end
  end
end
local missing = #needed
local oldest_of_all = math.min(oldest, tonumber(t[3] or oldest))
local missing_of_all = integer(t[6]) + missing
local by = WHO .. ' ' .. versions
if string.find(by, '\t', 1, true) or string.find(by, '\n', 1, true) then by = string.gsub(by, '[\t\n]', ' ') end
local chunk = { 'blob', blob, 'bytes', #blob + CHUNK_OVERHEAD, 'tokens', tokens, 'oldest', oldest, 'missing', missing,
  'written_s', now_text, 'by', by, final and 'final' or nil, final and 1 or nil }
local whole = { 'next', index + 1, 'oldest', oldest_of_all, 'newest', math.max(newest, tonumber(t[4] or newest)),
  'tokens', integer(t[5]) + tokens, 'missing', missing_of_all, 'live', integer(t[7]) + 1, 'since', now_text,
  final and 'final' or (ends_turn and 'state' or nil), final and 1 or (ends_turn and 'waiting' or nil) }
call('HSET', ckey, unpack(chunk))
call('HSET', tkey, unpack(whole))
count('bytes', #blob + CHUNK_OVERHEAD)
touch(WHO)
count('stored:' .. WHO, tokens)
if keeps == 0 then let_go(trajectory, WHO) end
if tokens == 0 then -- nothing of it grows old
  call('HDEL', ckey, 'oldest')
  call('HDEL', tkey, 'oldest', 'newest')
  call('HSET', tkey, 'opening', 1)
end

if not is_training then
  if index > 0 then
    local before_it = chunk_id(trajectory, index - 1)
    leaving().chunk(before_it)
    call('DEL', chunk_key(before_it))
  end
  if keeps == 0 then call('ZADD', P .. (final and 'due:reward' or 'due:turn'), now + S.scoring_deadline_s, cid) end
  return { 'stored', keeps }
end

count('tokens:admitted', tokens)
has_moved(trajectory)
for _, field in ipairs(needed) do
  -- guidance is due only once its reward, which has the texts, is written
  if field ~= 'guidance' then call('ZADD', P .. 'due:' .. field, now + S.scoring_deadline_s, cid) end
end

if S.unit == 'group' then
  local group = string.match(trajectory, '^t%.(%d+)')
  local gkey = group_key(group)
  if tokens == 0 then
    call('HINCRBY', gkey, 'missing', missing)
    return { 'stored', 0 }
  end
  local g = call('HMGET', gkey, 'oldest', 'missing', 'finals')
  call('HSET', gkey, 'oldest', math.min(oldest, tonumber(g[1] or oldest)), 'missing', integer(g[2]) + missing,
    'finals', integer(g[3]) + (final and 1 or 0))
  call('ZADD', P .. 'running_age', 'LT', oldest, group)
  if integer(g[2]) + missing == 0 then ready_if_sampled(trajectory, index) end
  return { 'stored', keeps }
end
if tokens == 0 then
  call('ZREM', P .. 'running_age', S.unit == 'trajectory' and trajectory or cid)
  return { 'stored', 0 }
end
if S.unit == 'trajectory' then
  call('ZADD', P .. 'running_age', oldest_of_all, trajectory)
  if missing_of_all == 0 then ready_if_sampled(trajectory, index) end
  return { 'stored', keeps }
end

if index > 0 then
  count('bytes', -last_bytes(tkey))
  call('HDEL', tkey, 'last', 'last_turn')
end
call('ZADD', P .. 'running_age', oldest, cid)
if missing == 0 then ready_if_sampled(trajectory, index) end
if keeps == 0 then return { 'stored', 0 } end
if newest < counter('version') or refusal(1) then
  let_go(trajectory, WHO)
  call('ZADD', P .. 'parked', trajectory_order(trajectory), trajectory)
  return { 'stored', 0 }
end
local following = chunk_id(trajectory, index + 1)
call('ZADD', P .. 'running', chunk_order(trajectory, index + 1), following)
call('ZADD', P .. 'running_age', published_updates(), following)
count('used', 1)
return { 'stored', 1 }
