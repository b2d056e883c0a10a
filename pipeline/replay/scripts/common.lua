-- common.lua: put before every script by pipeline.replay.scripts; not a transition of its own.
--
-- KEYS[1]  {run}:counters, by which the script is routed. Every other key is derived from its hash tag, so lies in the same
--          slot; pipeline/replay/keys.py lists them all.
-- ARGV[1]  now in seconds, or '' for the server's own time
-- ARGV[2]  worker, ARGV[3] epoch of the caller; '' and '0' for calls that need no incarnation
--
-- Errors: FENCED <newest epoch>, UNOPENED, UNKEPT, UNMARKED, LATE. Each is raised before the first write. Under `maxmemory` a server refuses
-- the first write of a script that may need memory, and never a later one, so a script either changes nothing or completes.

local call = redis.call
local P = string.sub(KEYS[1], 1, -9)
local COUNTERS = KEYS[1]
local CHUNK_OVERHEAD = 512
local MAX_CHUNKS = 65536
local FIELDS = { 'reward', 'reference', 'value' }

local function integer(value) return tonumber(value or '0') end

local S = call('HMGET', P .. 'spec', 'unit', 'group_size', 'units_per_update', 'eta', 'num_prompts', 'surplus', 'fields',
  'signal_filter', 'late', 'lease_s', 'scoring_deadline_s', 'max_attempts', 'max_bytes',
  'value_training', 'prompt_filter')
if not S[1] then return redis.error_reply('UNOPENED no ledger of this run') end
S = {
  unit = S[1], group_size = tonumber(S[2]), batch = tonumber(S[3]), eta = tonumber(S[4]), num_prompts = tonumber(S[5]),
  surplus = tonumber(S[6]), fields = S[7], signal_filter = S[8] == '1', late = S[9], lease_s = tonumber(S[10]),
  scoring_deadline_s = tonumber(S[11]), max_attempts = tonumber(S[12]), max_bytes = tonumber(S[13]),
  value_training = S[14] == '1', prompt_filter = S[15] == '1',
}
-- credit that one unit takes
local WEIGHT = S.unit == 'group' and S.group_size or 1

local now = tonumber(ARGV[1])
if not now then
  local time = call('TIME')
  now = tonumber(time[1]) + tonumber(time[2]) / 1000000
end

local WHO = ARGV[2] .. '#' .. ARGV[3]
if ARGV[2] ~= '' then
  local newest = integer(call('HGET', P .. 'epochs', ARGV[2]))
  if newest > tonumber(ARGV[3]) then return redis.error_reply('FENCED ' .. newest) end
end

-- Scripts that make room begin with a write that is never refused for want of memory; the rest of the script then passes too.
local function allow_growth() call('DEL', P .. 'never') end

-- Counts wait here until the transition is over (pipeline.replay.scripts): a batch of units that ends is counted in one go.
local counted = {}
local function count(name, by) counted[name] = (counted[name] or 0) + by end
local before = {}
local function read_counters(...)
  for i, value in ipairs(call('HMGET', COUNTERS, ...)) do before[select(i, ...)] = integer(value or nil) end
end
local function counter(name)
  if not before[name] then read_counters(name) end
  return before[name] + (counted[name] or 0)
end
local function write_counts()
  for name, by in pairs(counted) do
    if by ~= 0 then call('HINCRBY', COUNTERS, name, by) end
  end
end

-- One command for many members, in parts that fit on Lua's stack. An even number, so that no score is parted from its member.
local PART = 1000
local function call_many(members, ...)
  for first = 1, #members, PART do
    local command = { ... }
    for i = first, math.min(first + PART - 1, #members) do command[#command + 1] = members[i] end
    call(unpack(command))
  end
end

-- Calls that give something out, or take it back, carry a number that their caller counts up, one call of a kind at a time.
-- {run}:asked:<who> keeps the last number of each kind with its answer. The same number again is a repeat, because the answer
-- was lost: it gets the same answer and changes nothing. A lower one is a copy that its caller has given up long ago, which
-- some connection delivered all the same: nobody would know of what it was given.
local ASKED = P .. 'asked:' .. WHO
local ASKED_FOR_S = 86400
local LATE = redis.error_reply('LATE a copy of a request that later ones overtook')

-- Return 'new', 'again' or 'late'.
local function order_of(kind, number)
  local last = integer(call('HGET', ASKED, kind))
  if tonumber(number) > last then return 'new' end
  return tonumber(number) == last and 'again' or 'late'
end

local function remember(kind, number, ...)
  call('HSET', ASKED, kind, number, ...)
  call('EXPIRE', ASKED, ASKED_FOR_S)
end

-- -- names ---------------------------------------------------------------------------------------------------------------

local function trajectory_key(tid) return P .. 'trajectory:' .. tid end
local function chunk_key(cid) return P .. 'chunk:' .. cid end
local function finished_key(tid) return P .. 'finished:' .. tid end
local function group_key(number) return P .. 'group:' .. number end

local function parts(tid)
  local lane, group, member = string.match(tid, '^(.-)%.(%d+)%.(%d+)$')
  return lane, tonumber(group), tonumber(member)
end

local function chunk_parts(cid)
  local tid, index = string.match(cid, '^(.*)%.(%d+)$')
  return tid, tonumber(index)
end

local function is_evaluation(tid) return string.sub(tid, 1, 2) ~= 't.' end

local function trajectory_order(tid)
  local lane, group, member = parts(tid)
  if lane == 't' then return group * S.group_size + member end
  return tonumber(string.sub(lane, 2)) * 1e11 + group * 1e4 + member
end

local function chunk_id(tid, index) return tid .. '.' .. string.format('%d', index) end
local function chunk_order(tid, index) return trajectory_order(tid) * MAX_CHUNKS + index end

-- -- lineage -------------------------------------------------------------------------------------------------------------

-- Return how many updates are in the weights that a version names (pipeline.lineage).
local function updates_in(version)
  local restart = call('ZREVRANGEBYSCORE', P .. 'lineage', version, '-inf', 'LIMIT', 0, 1)[1]
  if not restart then return version end
  local first, updates = string.match(restart, '^(%d+):(%d+)$')
  return tonumber(updates) + version - tonumber(first)
end

-- Return how many updates are in the published version; read once a transition.
local published
local function published_updates()
  published = published or updates_in(counter('version'))
  return published
end

-- What was trained by the time that so many updates were settled, so that going back can count what it gives up.
local CURRENCIES = { 'credit', 'groups', 'trajectories', 'tokens' }
local MAX_MILESTONES = 1000

local function milestone(updates, totals) return string.format('%d:%d:%d:%d:%d', updates, unpack(totals)) end

local function milestone_parts(text)
  local parts = {}
  for number in string.gmatch(string.match(text, '^%d+:(.*)$'), '%d+') do parts[#parts + 1] = tonumber(number) end
  return parts
end

local function mark(updates)
  local totals = {}
  for i, currency in ipairs(CURRENCIES) do totals[i] = counter(currency .. ':trained') end
  call('ZREMRANGEBYSCORE', P .. 'milestones', updates, updates)
  call('ZADD', P .. 'milestones', updates, milestone(updates, totals))
  call('ZREMRANGEBYRANK', P .. 'milestones', 0, -MAX_MILESTONES - 1)
end

local function credit_limit() return (S.eta + published_updates() + 1) * S.batch + S.surplus end

-- -- credit --------------------------------------------------------------------------------------------------------------

-- Return why `wanted` more credits cannot be given, or nil when they can.
local function refusal(wanted)
  if not before.closed then read_counters('closed', 'bytes', 'used') end
  if counter('closed') == 1 then return 'closed' end
  if S.max_bytes and counter('bytes') > S.max_bytes then return 'memory' end
  if counter('used') + wanted > credit_limit() then return 'no_credit' end
  return nil
end

-- Whether every prompt is admitted, and none waits to be admitted again.
local function is_exhausted()
  if not S.num_prompts or call('ZCARD', P .. 'again') > 0 then return false end
  return counter('groups:admitted') - counter('groups:again') >= S.num_prompts
end

-- The place of a group's prompt in the stream: its own number, less what was admitted again before it.
local function prompt_of(group)
  return tonumber(call('HGET', group_key(string.format('%d', group)), 'prompt') or group)
end

local function run_unit(name, order)
  call('ZADD', P .. 'running', order, name)
end

-- -- holding -------------------------------------------------------------------------------------------------------------

local function touch(who) call('ZADD', P .. 'holders', now + S.lease_s, who) end

local function let_go(tid, who)
  call('SREM', P .. 'held:' .. who, tid)
  call('HDEL', trajectory_key(tid), 'holder')
end

-- The units that the next tokens of these { trajectory, index of the next chunk } belong to may from now on hold tokens of the
-- present version.
local function begin_ages(held)
  local ages, is_there = {}, {}
  for _, one in ipairs(held) do
    local tid, next_index = one[1], one[2]
    local unit = tid
    if S.unit == 'group' then
      local _, group = parts(tid)
      unit = string.format('%d', group)
    elseif S.unit == 'chunk' then
      unit = chunk_id(tid, next_index)
    end
    if not (is_evaluation(tid) or is_there[unit] or (S.unit == 'trajectory' and next_index > 0)) then
      is_there[unit] = true
      ages[#ages + 1] = published_updates()
      ages[#ages + 1] = unit
    end
  end
  if S.unit == 'group' then call_many(ages, 'ZADD', P .. 'running_age', 'LT') else call_many(ages, 'ZADD', P .. 'running_age') end
end

-- Open a held trajectory for others. What it has not begun cannot grow old.
local function reopen(tid, who)
  let_go(tid, who)
  local key = trajectory_key(tid)
  call('HSET', key, 'since', string.format('%.17g', now))
  if is_evaluation(tid) then
    call('ZADD', P .. 'evaluation_open', trajectory_order(tid), tid)
    return
  end
  call('ZADD', P .. 'open', trajectory_order(tid), tid)
  local next_index = integer(call('HGET', key, 'next'))
  if S.unit == 'chunk' then
    call('ZREM', P .. 'running_age', chunk_id(tid, next_index))
  elseif S.unit == 'trajectory' and next_index == 0 then
    call('ZREM', P .. 'running_age', tid)
  end
end

local function reopen_all(who)
  local held = call('SMEMBERS', P .. 'held:' .. who)
  for _, tid in ipairs(held) do reopen(tid, who) end
  return #held
end

-- -- leaving the ledger --------------------------------------------------------------------------------------------------

-- Forget whatever points to a chunk, which for one that has all its scores is nothing; return its tokens. Its key is left to
-- be deleted.
local function forget_chunk(cid, is_complete)
  local c = call('HMGET', chunk_key(cid), 'tokens', 'bytes')
  if not is_complete then
    for _, field in ipairs(FIELDS) do call('ZREM', P .. 'due:' .. field, cid) end
  end
  count('bytes', -integer(c[2]))
  return integer(c[1])
end

-- Count a chunk's tokens as trained (no reason) or dropped, and forget it; its key is left to be deleted.
local function end_chunk(cid, reason)
  count(reason and ('tokens:dropped:' .. reason) or 'tokens:trained', forget_chunk(cid, not reason))
end

-- Settle a trajectory as trained (no reason) or dropped, and its group when it was the last of it; the keys of its chunks go
-- with it.
local function end_trajectory(tid, reason, holder, final, keys)
  local key = trajectory_key(tid)
  local _, group = parts(tid)
  if holder then let_go(tid, holder) end
  if not final then -- else nobody will extend it: it is in no queue
    call('ZREM', P .. 'open', tid)
    call('ZREM', P .. 'parked', tid)
    count('bytes', -call('HSTRLEN', key, 'last'))
  end
  keys[#keys + 1] = key
  call_many(keys, 'DEL')
  count(reason and ('trajectories:dropped:' .. reason) or 'trajectories:trained', 1)
  local gkey = group_key(group)
  if reason then call('HINCRBY', gkey, 'dropped', 1) end
  if call('HINCRBY', gkey, 'live', -1) == 0 then
    local is_trained = integer(call('HGET', gkey, 'dropped')) < S.group_size
    count(is_trained and 'groups:trained' or ('groups:dropped:' .. reason), 1)
    call('DEL', gkey)
    call('ZREM', P .. 'groups', group)
  end
end

local function end_bare_trajectory(tid, reason)
  local t = call('HMGET', trajectory_key(tid), 'holder', 'final')
  end_trajectory(tid, reason, t[1], t[2], {})
end

local function end_whole_trajectory(tid, reason)
  local t, keys = call('HMGET', trajectory_key(tid), 'next', 'holder', 'final'), {}
  for index = 0, integer(t[1]) - 1 do
    local cid = chunk_id(tid, index)
    end_chunk(cid, reason)
    keys[#keys + 1] = chunk_key(cid)
  end
  end_trajectory(tid, reason, t[2], t[3], keys)
end

-- A chunk leaves by itself. The newest chunk of an unfinished trajectory leaves its blob behind: the next window needs it.
local function end_chunk_unit(cid, reason)
  local tid, index = chunk_parts(cid)
  local key = trajectory_key(tid)
  local t = call('HMGET', key, 'next', 'final')
  if not t[2] and integer(t[1]) == index + 1 then
    local blob = call('HGET', chunk_key(cid), 'blob')
    call('HSET', key, 'last', blob)
    count('bytes', #blob)
  end
  end_chunk(cid, reason)
  call('DEL', chunk_key(cid))
  if not reason then call('HSET', key, 'trained', 1) end
  if call('HINCRBY', key, 'live', -1) == 0 and t[2] then
    if call('HGET', key, 'trained') then reason = nil end
    end_bare_trajectory(tid, reason)
  end
end

-- Forget what is kept of a trajectory for the value worker.
local function forget_finished(tid)
  local key = finished_key(tid)
  count('bytes', -integer(call('HGET', key, 'bytes')))
  call('DEL', key)
end

-- No critic may learn from this trajectory: forget it, even out of a claim.
local function discard_finished(tid, reason)
  local f = call('HMGET', finished_key(tid), 'bytes', 'state', 'claim')
  -- what the value worker has claimed at the run's end it has trained on, and settles as it drains
  if not f[1] or (f[3] and reason == 'cancelled') then return end
  if f[2] then count('finished:dropped:' .. reason, 1) end
  call('ZREM', P .. 'finished', tid)
  if f[3] then call('ZREM', P .. 'finished_claim:' .. f[3], tid) end
  forget_finished(tid)
end

local SPOILING = { dead_letter = true, non_finite = true, cancelled = true }

local function spoil(name, reason)
  if S.unit == 'group' then
    for member = 0, S.group_size - 1 do discard_finished('t.' .. name .. '.' .. string.format('%d', member), reason) end
  elseif S.unit == 'trajectory' then
    discard_finished(name, reason)
  else
    local tid = chunk_parts(name)
    call('HSET', trajectory_key(tid), 'spoiled', 1)
    discard_finished(tid, reason)
  end
end

-- Take a unit out of the ledger: trained (no reason; it is in a claim and in no index), or dropped, which returns its credit.
local function end_unit(name, reason)
  if reason then
    for _, index in ipairs({ 'running', 'running_age', 'ready', 'ready_age' }) do call('ZREM', P .. index, name) end
    count('used', -WEIGHT)
  else
    count('credit:trained', WEIGHT)
  end
  if S.value_training and SPOILING[reason or ''] then spoil(name, reason) end
  if S.unit == 'group' then
    local last = S.group_size - 1
    for member = 0, last do end_whole_trajectory('t.' .. name .. '.' .. member, reason) end
  elseif S.unit == 'trajectory' then
    end_whole_trajectory(name, reason)
  else
    end_chunk_unit(name, reason)
  end
end

local function unit_key(name)
  if S.unit == 'group' then return group_key(name) end
  if S.unit == 'trajectory' then return trajectory_key(name) end
  return chunk_key(name)
end

-- `oldest`: updates in the unit's oldest token.
local function make_ready(name, order, oldest)
  call('ZREM', P .. 'running', name)
  call('ZREM', P .. 'running_age', name)
  call('ZADD', P .. 'ready', order, name)
  call('ZADD', P .. 'ready_age', integer(oldest), name)
  call('HSET', unit_key(name), 'state', 'ready', 'ready_s', string.format('%.17g', now))
end

-- Whether at least so many members of a group are scored, and all of them equally accurate.
local function is_alike(group, least)
  local g = call('HMGET', group_key(group), 'scored', 'mixed')
  return integer(g[1]) >= least and not g[2]
end

-- After the chunk or score that was the last to be missed: make the unit of this chunk ready, unless it is filtered away or its
-- sampling is not over.
local function ready_if_sampled(tid, index)
  local _, group = parts(tid)
  if S.unit == 'group' then
    local g = call('HMGET', group_key(group), 'finals', 'oldest')
    if integer(g[1]) < S.group_size then return end
    local name = string.format('%d', group)
    if S.signal_filter and is_alike(group, S.group_size) then
      end_unit(name, 'no_signal')
    else
      make_ready(name, group, g[2])
    end
  elseif S.unit == 'trajectory' then
    local t = call('HMGET', trajectory_key(tid), 'final', 'oldest')
    if t[1] then make_ready(tid, trajectory_order(tid), t[2]) end
  else
    local cid = chunk_id(tid, index)
    if S.prompt_filter and is_alike(group, 2) then
      end_unit(cid, 'no_signal')
    else
      make_ready(cid, chunk_order(tid, index), call('HGET', chunk_key(cid), 'oldest'))
    end
  end
end

local function is_needed(field, final)
  if field == 'reward' and not final then return false end
  return string.find(S.fields, field, 1, true) ~= nil
end

-- Evaluation: a response leaves with its sample recorded, or as failed.
local function end_evaluation(tid, index)
  local cid = chunk_id(tid, index)
  forget_chunk(cid)
  call('DEL', chunk_key(cid), trajectory_key(tid))
end
