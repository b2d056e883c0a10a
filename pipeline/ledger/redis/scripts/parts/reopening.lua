-- reopening.lua: reopens held trajectories, and dates units that begin.
--
-- Uses     beginning holding many names versions

-- Date the units to which the next tokens of each { trajectory, index of its next chunk, updates in its
-- oldest token if it has any } belong: from now on they may contain tokens of the current version.
local function begin_ages(begun)
  local ages, is_there = {}, {}
  for _, one in ipairs(begun) do
    local tid, next_index, oldest = one[1], one[2], one[3]
    local unit = tid
    if S.unit == 'group' then
      local _, group = parts(tid)
      unit = string.format('%d', group)
    elseif S.unit == 'chunk' then
      unit = chunk_id(tid, next_index)
    end
    if not (is_evaluation(tid) or is_there[unit] or (S.unit == 'trajectory' and oldest)) then
      is_there[unit] = true
      ages[#ages + 1] = published_updates()
      ages[#ages + 1] = unit
    end
  end
  if S.unit == 'group' then call_many(ages, 'ZADD', P .. 'running_age', 'LT') else call_many(ages, 'ZADD', P .. 'running_age') end
end

-- Reopen a held trajectory. A unit without tokens loses its date, since it cannot grow old.
local function reopen(tid, who)
  let_go(tid, who)
  local key = trajectory_key(tid)
  call('HSET', key, 'since', now_text)
  if is_evaluation(tid) then
    call('ZADD', P .. 'evaluation_open', trajectory_order(tid), tid)
    return
  end
  call('ZADD', P .. 'open', trajectory_order(tid), tid)
  local t = call('HMGET', key, 'next', 'oldest')
  if S.unit == 'chunk' then
    call('ZREM', P .. 'running_age', chunk_id(tid, integer(t[1])))
  elseif S.unit == 'trajectory' and not t[2] then
    call('ZREM', P .. 'running_age', tid)
  end
end

local function reopen_all(who)
  local held = call('SMEMBERS', P .. 'held:' .. who)
  for _, tid in ipairs(held) do reopen(tid, who) end
  return #held
end
