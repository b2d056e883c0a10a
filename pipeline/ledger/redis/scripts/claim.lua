-- claim.lua: drop ready units that are too stale, then lease one update's units to the learner, or
-- return what it has to wait for.
--
-- The choice equals pipeline.ledger.staleness.choose; pipeline/ledger/staleness.md proves what it
-- guarantees.
--
-- It is a single step, since the choice is made at one moment and a claim is whole. For an update of
-- 3,125 groups of eight, out of 100,000 chunks, that takes 0.2 s on a busy machine; settling takes 3 s.
--
-- Uses     beginning counts leaving many prompts ready requests versions
-- Reads    settings counters running running_age parked
-- Writes   ready ready_age claims claim:<id> asked:<who>, the units' state, and what dropping a unit writes
-- ARGV[4]  version  integer  the learner's
-- ARGV[5]  request  integer  its number
-- ARGV[6]  id       text     for the new claim
-- Returns  { 'claim', version, unit, ... } or { wait, ready units, needed units, oldest running unit
--          or '' }

local version, request, id = tonumber(ARGV[4]), ARGV[5], ARGV[6]
local order, there = order_of('claim', request), call('HGET', P .. 'claims', id)
if order == 'late' then return LATE end
if order == 'again' and call('HGET', ASKED, 'claim:given') == '1' then
  if not there then return LATE end
  local reply = { 'claim', tonumber(there) }
  for _, name in ipairs(call('ZRANGE', P .. 'claim:' .. id, 0, -1)) do reply[#reply + 1] = name end
  return reply
end

if order == 'again' then
  local said = call('HGET', ASKED, 'claim:refused')
  local wait, was_ready, was_needed, oldest = string.match(said, '^(%S+) (%d+) (%d+) (.*)$')
  return { wait, tonumber(was_ready), tonumber(was_needed), oldest }
end
allow_growth()
local made = updates_in(version)
local edge = made - S.eta
for _, unit in ipairs(call('ZRANGEBYSCORE', P .. 'ready_age', '-inf', '(' .. string.format('%d', edge))) do
  leaving().unit(unit, 'stale', made)
end

local needed, surplus = S.batch / WEIGHT, math.floor(S.surplus / WEIGHT)
local num_ready = call('ZCARD', P .. 'ready') -- before reading them, since a waiting learner asks often

local function refuse(wait)
  local oldest = call('ZRANGE', P .. 'running', 0, 0)[1] or ''
  remember('claim', request, 'claim:given', 0, 'claim:refused', table.concat({ wait, num_ready, needed, oldest }, ' '))
  return { wait, num_ready, needed, oldest }
end

if num_ready < needed then
  local closed = counter('closed') == 1
  local ended = closed or is_exhausted()
  local moving = call('ZCARD', P .. 'running') > 0 or (not closed and call('ZCARD', P .. 'parked') > 0)
  return refuse((ended and not moving) and 'starved' or 'not_enough')
end
if S.late == 'wait' and call('ZCOUNT', P .. 'running_age', edge, edge) > 0 then return refuse('late_work') end

local ready = call('ZRANGE', P .. 'ready', 0, -1, 'WITHSCORES')
local chosen, num_chosen = {}, 0
for lag = 0, S.eta - 1 do
  local horizon = edge + lag
  local due = call('ZCOUNT', P .. 'ready_age', edge, horizon) + call('ZCOUNT', P .. 'running_age', edge, horizon)
  local urgent = math.min(due - lag * needed, needed)
  if num_chosen < urgent then
    for i = 1, #ready, 2 do
      if num_chosen >= urgent then break end
      local name = ready[i]
      if not chosen[name] and tonumber(call('ZSCORE', P .. 'ready_age', name)) <= horizon then
        chosen[name] = true
        num_chosen = num_chosen + 1
      end
    end
  end
  if S.late == 'wait' and num_chosen < math.min(due - lag * needed - surplus, needed) then return refuse('late_work') end
end
for i = 1, #ready, 2 do
  if num_chosen >= needed then break end
  if not chosen[ready[i]] then
    chosen[ready[i]] = true
    num_chosen = num_chosen + 1
  end
end

local reply, names, ordered = { 'claim', version }, {}, {}
for i = 1, #ready, 2 do
  local name = ready[i]
  if chosen[name] then
    call('HSET', unit_key(name), 'state', 'claimed', 'claimed_s', now_text)
    reply[#reply + 1], names[#names + 1] = name, name
    ordered[#ordered + 1] = ready[i + 1]
    ordered[#ordered + 1] = name
  end
end
call_many(names, 'ZREM', P .. 'ready')
call_many(names, 'ZREM', P .. 'ready_age')
call_many(ordered, 'ZADD', P .. 'claim:' .. id)
call('HSET', P .. 'claims', id, version)
remember('claim', request, 'claim:given', 1)
return reply
