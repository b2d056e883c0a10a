-- audit.lua: count what is in flight by walking the store, beside the counters, at one moment.
--
-- Uses     beginning names
-- Reads    counters groups group:* trajectory:* chunk:* finished finished_claims finished_claim:*
--          finished:*
-- Returns  { counters as name, value, ... }, then { currency, state, number } for each state that
--          something is in

local RANK = { open = 1, leased = 2, finished = 3, ready = 4, claimed = 5 }
local found = { groups = {}, trajectories = {}, tokens = {}, finished = {} }

local function add(currency, state, by) found[currency][state] = (found[currency][state] or 0) + by end

-- A chunk unit's own state; chunks of larger units share their trajectory's.
local function walk_chunks(tid, next_index, shared)
  local least
  for index = 0, next_index - 1 do
    local c = call('HMGET', chunk_key(chunk_id(tid, index)), 'tokens', 'state')
    if c[1] then
      local state = shared or c[2] or 'finished'
      add('tokens', state, tonumber(c[1]))
      if not least or RANK[state] < RANK[least] then least = state end
    end
  end
  return least
end

local function walk_trajectory(tid, unit_state)
  local key = trajectory_key(tid)
  local t = call('HMGET', key, 'next', 'holder', 'final', 'state')
  if not t[1] then return nil end
  local state = unit_state or t[4] or (t[3] and 'finished') or (t[2] and 'leased') or 'open'
  local least = walk_chunks(tid, tonumber(t[1]), S.unit ~= 'chunk' and state or nil)
  if S.unit == 'chunk' and t[3] then state = least end
  add('trajectories', state, 1)
  return state
end

for _, group in ipairs(call('ZRANGE', P .. 'groups', 0, -1)) do
  local unit_state = call('HGET', group_key(group), 'state') or nil
  local least
  for member = 0, S.group_size - 1 do
    local state = walk_trajectory(member_of(group, member), unit_state)
    if state and (not least or RANK[state] < RANK[least]) then least = state end
  end
  add('groups', least, 1)
end

local function walk_finished(names, state)
  for _, tid in ipairs(names) do add('finished', state, call('EXISTS', finished_key(tid))) end
end
walk_finished(call('ZRANGE', P .. 'finished', 0, -1), 'waiting')
for _, id in ipairs(call('SMEMBERS', P .. 'finished_claims')) do
  walk_finished(call('ZRANGE', P .. 'finished_claim:' .. id, 0, -1), 'claimed')
end

local reply = { call('HGETALL', COUNTERS) }
for currency, states in pairs(found) do
  for state, number in pairs(states) do reply[#reply + 1] = { currency, state, number } end
end
return reply
