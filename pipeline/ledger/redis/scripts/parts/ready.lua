-- ready.lua: makes complete units ready to be claimed.
--
-- Uses     beginning leaving names

local function unit_key(name)
  if S.unit == 'group' then return group_key(name) end
  if S.unit == 'trajectory' then return trajectory_key(name) end
  return chunk_key(name)
end

-- Whether all responses of a unit that get a verdict are masked, so that none of its tokens trains.
local function is_all_masked(name)
  local u = call('HMGET', unit_key(name), 'masked', 'unjudged')
  if S.unit ~= 'group' then return integer(u[1]) == 1 end
  return integer(u[1]) + integer(u[2]) == S.group_size
end

-- `oldest`: updates in the unit's oldest token.
local function make_ready(name, order, oldest)
  call('ZREM', P .. 'running', name)
  call('ZREM', P .. 'running_age', name)
  call('ZADD', P .. 'ready', order, name)
  call('ZADD', P .. 'ready_age', integer(oldest), name)
  call('HSET', unit_key(name), 'state', 'ready', 'ready_s', now_text)
end

-- Make this chunk's unit ready, unless it is filtered out, without tokens, or still being sampled. Called
-- when the last missing chunk or score is written.
local function ready_if_sampled(tid, index)
  local _, group = parts(tid)
  if S.unit == 'group' then
    local g = call('HMGET', group_key(group), 'finals', 'oldest', 'scored', 'mixed', 'unjudged')
    if integer(g[1]) < S.group_size then return end
    local name = string.format('%d', group)
    -- no member waits for a verdict, and all verdicts have the same accuracy
    local is_alike = S.signal_filter and integer(g[3]) + integer(g[5]) >= S.group_size and not g[4]
    if is_alike or not g[2] or is_all_masked(name) then
      leaving().unit(name, 'no_signal')
    else
      make_ready(name, group, g[2])
    end
  elseif S.unit == 'trajectory' then
    local t = call('HMGET', trajectory_key(tid), 'final', 'oldest')
    if not t[1] then return end
    if not t[2] or is_all_masked(tid) then
      leaving().unit(tid, 'no_signal')
    else
      make_ready(tid, trajectory_order(tid), t[2])
    end
  else
    local cid = chunk_id(tid, index)
    local oldest = call('HGET', chunk_key(cid), 'oldest')
    if not oldest or is_all_masked(cid) then
      leaving().unit(cid, 'no_signal')
    else
      make_ready(cid, chunk_order(tid, index), oldest)
    end
  end
end

local function is_needed(field, final, ends_turn)
  if field == 'turn' then return ends_turn end
  if (field == 'reward' or field == 'guidance') and not final then return false end
  return string.find(S.fields, field, 1, true) ~= nil
end
