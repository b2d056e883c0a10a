-- common.lua: put before every script by pipeline.ledger.redis.scripts, with leaving.lua and ready.lua; not a transition of its own.
--
-- KEYS[1]  {run}:counters, by which the script is routed. Every other key is derived from its hash tag, so lies in the same
--          slot; pipeline/ledger/redis/keys.py lists them all.
-- ARGV[1]  now in seconds, or '' for the server's own time
-- ARGV[2]  worker, ARGV[3] epoch of the caller; '' and '0' for calls that need no incarnation
--
-- Errors: FENCED <newest epoch>, UNOPENED, UNKEPT, UNMARKED, LATE. Each is raised before the first write. Under `maxmemory` a
-- server refuses the first write of a script that may need memory, and never a later one, so a script either changes nothing or
-- completes.

local call = redis.call
local P = string.sub(KEYS[1], 1, -9)
local COUNTERS = KEYS[1]
local CHUNK_OVERHEAD = 512
local MAX_CHUNKS = 65536
local FIELDS = { 'reward', 'reference', 'value' }

local function integer(value) return tonumber(value or '0') end

local S = call('GET', P .. 'settings') -- the specification, as pipeline.ledger.redis.ledger packs it
if not S then return redis.error_reply('UNOPENED no ledger of this run') end
S = cmsgpack.unpack(S)
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

-- Counts wait here until the transition is over (pipeline.ledger.redis.scripts): a batch of units that ends is counted in one go.
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

-- Return how many updates are in the weights that a version names (pipeline.ledger.version_history).
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
