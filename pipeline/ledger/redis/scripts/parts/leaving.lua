-- leaving.lua: how chunks, trajectories, groups and units leave the ledger. Most calls never need
-- these functions: they are made when a transition first needs one.
--
-- Uses     beginning counts holding many names

local left
local function leaving()
  if left then return left end

  -- Forget what points to a chunk, which for one that has all its scores is nothing; return its
  -- tokens. Its key is left to be deleted.
  local function forget_chunk(cid, is_complete)
    local c = call('HMGET', chunk_key(cid), 'tokens', 'bytes')
    if not is_complete then
      for _, field in ipairs(FIELDS) do call('ZREM', P .. 'due:' .. field, cid) end
    end
    count('bytes', -integer(c[2]))
    return integer(c[1])
  end

  -- Count a chunk's tokens as trained (no reason) or dropped, and forget it. Its key is left to be
  -- deleted.
  local function end_chunk(cid, reason)
    count(reason and ('tokens:dropped:' .. reason) or 'tokens:trained', forget_chunk(cid, not reason))
  end

  -- Settle a trajectory as trained (no reason) or dropped, and its group when it was the last of
  -- it. The keys of its chunks go with it.
  local function end_trajectory(tid, reason, holder, final, keys)
    local key = trajectory_key(tid)
    local _, group = parts(tid)
    if holder then let_go(tid, holder) end
    if not final then -- a final one is in no queue
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

  -- A chunk leaves by itself. The newest chunk of an unfinished trajectory leaves its blob behind:
  -- the next window needs it.
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
    -- claimed at the run's end: the value worker has trained on it, and settles it as it drains
    if not f[1] or (f[3] and reason == 'cancelled') then return end
    if f[2] then count('finished:dropped:' .. reason, 1) end
    call('ZREM', P .. 'finished', tid)
    if f[3] then call('ZREM', P .. 'finished_claim:' .. f[3], tid) end
    forget_finished(tid)
  end

  local SPOILING = { dead_letter = true, non_finite = true, cancelled = true }

  local function spoil(name, reason)
    if S.unit == 'group' then
      for member = 0, S.group_size - 1 do discard_finished(member_of(name, member), reason) end
    elseif S.unit == 'trajectory' then
      discard_finished(name, reason)
    else
      local tid = chunk_parts(name)
      call('HSET', trajectory_key(tid), 'spoiled', 1)
      discard_finished(tid, reason)
    end
  end

  -- Take a unit out of the ledger: trained (no reason; it is in a claim and in no index), or
  -- dropped, which returns its credit.
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
      for member = 0, last do end_whole_trajectory(member_of(name, member), reason) end
    elseif S.unit == 'trajectory' then
      end_whole_trajectory(name, reason)
    else
      end_chunk_unit(name, reason)
    end
  end

  -- Evaluation: a response leaves with its sample recorded, or as failed.
  local function end_evaluation(tid, index)
    local cid = chunk_id(tid, index)
    forget_chunk(cid)
    call('DEL', chunk_key(cid), trajectory_key(tid))
  end

  left = {
    chunk = forget_chunk, trajectory = end_bare_trajectory, unit = end_unit, evaluation = end_evaluation,
    forget_finished = forget_finished, discard_finished = discard_finished,
  }
  return left
end
