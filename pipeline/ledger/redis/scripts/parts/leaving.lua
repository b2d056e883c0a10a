-- leaving.lua: how chunks, trajectories, groups and units leave the ledger. The functions are created when
-- a transition first needs one, since most never do.
--
-- Uses     beginning counts holding many names lives showing tallies versions

-- Return the size of the chunk that a trajectory keeps for its next window, and of its turn (unit chunk).
local function last_bytes(key)
  return call('HSTRLEN', key, 'last') + (HAS_TURNS and call('HSTRLEN', key, 'last_turn') or 0)
end

local left
local function leaving()
  if left then return left end
  local life, tally = lives(), tallies()
  local num_chunks = 0

  -- Remove the index entries of a chunk (none if it has all its scores). Its key is not deleted yet.
  -- Return the fields for its row.
  local function forget_chunk(cid, is_complete)
    local c = life.chunk(cid)
    if not is_complete then
      for _, field in ipairs(FIELDS) do call('ZREM', P .. 'due:' .. field, cid) end
    end
    count('bytes', -integer(c[2]))
    return c
  end

  -- Count a chunk's tokens as trained (no reason) or dropped, and remove its index entries; return the
  -- fields for its row. Its key is not deleted yet.
  local function end_chunk(cid, reason)
    local c = forget_chunk(cid, not reason)
    num_chunks = num_chunks + 1
    count(reason and ('tokens:dropped:' .. reason) or 'tokens:trained', integer(c[1]))
    return c
  end

  -- End a trajectory as trained (no reason) or dropped, and its group with the last member. Its key is
  -- added to `keys`, to be deleted. `t`: fields for its life; `rows`: of its chunks. `g`: fields of its
  -- group if that is the unit; nil to read them here.
  local function end_trajectory(tid, reason, made, t, rows, keys, g)
    local key = trajectory_key(tid)
    local group, gkey
    if not g then
      group = select(2, parts(tid))
      gkey = group_key(group)
      g = life.group(group)
    end
    has_moved(tid)
    if t[1] then let_go(tid, t[1]) end
    if t[2] then
      tally.response(reason, t[3], g[3], g[4])
    else -- a final one is in no queue
      call('ZREM', P .. 'open', tid)
      call('ZREM', P .. 'parked', tid)
      count('bytes', -last_bytes(key))
    end
    life.keep(tid, reason and 'dropped' or 'trained', t, g, rows, life.unit_end(reason, made or published_updates(), t[5]))
    keys[#keys + 1] = key
    count(reason and ('trajectories:dropped:' .. reason) or 'trajectories:trained', 1)
    if S.unit == 'group' then return end -- the group ends once, for all members
    if reason then call('HINCRBY', gkey, 'dropped', 1) end
    if call('HINCRBY', gkey, 'live', -1) == 0 then
      local is_trained = integer(call('HGET', gkey, 'dropped')) < S.group_size
      count(is_trained and 'groups:trained' or ('groups:dropped:' .. reason), 1)
      call('DEL', gkey)
      call('ZREM', P .. 'groups', group)
    end
  end

  -- End a trajectory whose chunks have left (unit chunk); it has their rows.
  local function end_bare_trajectory(tid, reason, made)
    local key, rows = trajectory_key(tid), {}
    local t = life.trajectory(tid)
    for index = 0, integer(t[4]) - 1 do
      if life.is_shown(index, integer(t[4])) then rows[#rows + 1] = call('HGET', key, life.past_field(index)) or nil end
    end
    end_trajectory(tid, reason, made, t, rows, {})
    call('DEL', key)
  end

  -- End a trajectory with its chunks; their keys are added to `keys`, to be deleted. `g`: fields of its
  -- group if that is the unit. Return the updates in its oldest token.
  local function end_whole_trajectory(tid, reason, made, keys, g)
    local t, rows = life.trajectory(tid), {}
    local chunks = integer(t[4])
    for index = 0, chunks - 1 do
      local place = string.format('%d', index)
      local cid = tid .. '.' .. place
      local c = end_chunk(cid, reason)
      if life.is_shown(index, chunks) then rows[#rows + 1] = life.row(place, c) end
      keys[#keys + 1] = chunk_key(cid)
    end
    end_trajectory(tid, reason, made, t, rows, keys, g)
    return t[5]
  end

  -- End a chunk; its row stays with the trajectory. The newest chunk of an unfinished trajectory leaves
  -- its blob and its turn, which the next window needs; without the turn there is no next window. Return
  -- the updates in its oldest token.
  local function end_chunk_unit(cid, reason, made)
    local tid, index = chunk_parts(cid)
    local key = trajectory_key(tid)
    local t = call('HMGET', key, 'next', 'final', 'state')
    local is_over = t[2]
    if not is_over and integer(t[1]) == index + 1 then
      if t[3] == 'waiting' then
        is_over = true
        call('HDEL', key, 'state')
        call('HSET', key, 'final', 1)
      else
        local last = call('HMGET', chunk_key(cid), 'blob', 'turn')
        call('HSET', key, 'last', last[1])
        if last[2] then call('HSET', key, 'last_turn', last[2]) end
        count('bytes', #last[1] + #(last[2] or ''))
      end
    end
    local c = end_chunk(cid, reason)
    has_moved(tid)
    call('DEL', chunk_key(cid))
    local over = life.unit_end(reason, made or published_updates(), c[3])
    local kept = { life.past_field(index), life.row(string.format('%d', index), c, over) }
    if not reason then
      kept[3] = 'trained'
      kept[4] = 1
    end
    call('HSET', key, unpack(kept))
    if call('HINCRBY', key, 'live', -1) == 0 and is_over then
      if call('HGET', key, 'trained') then reason = nil end
      end_bare_trajectory(tid, reason, made)
    end
    return c[3]
  end

  -- Delete what is kept of a trajectory for the value worker.
  local function forget_finished(tid)
    local key = finished_key(tid)
    count('bytes', -integer(call('HGET', key, 'bytes')))
    call('DEL', key)
    has_moved(tid)
  end

  -- Keep a trajectory from the critic: delete it, even from a claim.
  local function discard_finished(tid, reason)
    local f = call('HMGET', finished_key(tid), 'bytes', 'state', 'claim')
    -- claimed at the end of the run: the value worker has trained on it, and settles it as it drains
    if not f[1] or (f[3] and reason == 'cancelled') then return end
    if f[2] then count('finished:dropped:' .. reason, 1) end
    call('ZREM', P .. 'finished', tid)
    if f[3] then call('ZREM', P .. 'finished_claim:' .. f[3], tid) end
    forget_finished(tid)
  end

  local SPOILING = { dead_letter = true, non_finite = true, cancelled = true }

  -- Keep a trajectory that stays in the ledger from the critic.
  local function spoil_trajectory(tid, reason)
    call('HSET', trajectory_key(tid), 'spoiled', 1)
    discard_finished(tid, reason)
  end

  local function spoil(name, reason)
    if S.unit == 'group' then
      for member = 0, S.group_size - 1 do discard_finished(member_of(name, member), reason) end
    elseif S.unit == 'trajectory' then
      discard_finished(name, reason)
    else
      spoil_trajectory(chunk_parts(name), reason)
    end
  end

  -- Remove a unit from the ledger: trained (no reason; then it is in a claim and in no index) or dropped,
  -- which returns its credit. `made`: updates in the version from which its staleness counts; nil for the
  -- published one.
  local function end_unit(name, reason, made)
    if reason == 'no_signal' then
      if S.unit == 'group' then
        for member = 0, math.min(S.group_size, 2) - 1 do show_trajectory(reason, member_of(name, member)) end
      else
        show_trajectory(reason, S.unit == 'trajectory' and name or (chunk_parts(name)))
      end
    end
    if reason then
      for _, index in ipairs({ 'running', 'running_age', 'ready', 'ready_age' }) do call('ZREM', P .. index, name) end
      count('used', -WEIGHT)
    else
      count('credit:trained', WEIGHT)
    end
    if S.value_training and SPOILING[reason or ''] then spoil(name, reason) end
    local oldest
    local keys = {}
    if S.unit == 'group' then
      local g = life.group(name)
      oldest = g[5]
      local has_unjudged = not reason and call('HGET', group_key(name), 'unjudged')
      for member = 0, S.group_size - 1 do
        local tid = member_of(name, member)
        local is_unjudged = has_unjudged and call('HGET', trajectory_key(tid), 'unjudged')
        end_whole_trajectory(tid, is_unjudged and 'dead_letter' or reason, made, keys, g)
      end
      count(reason and ('groups:dropped:' .. reason) or 'groups:trained', 1)
      keys[#keys + 1] = group_key(name)
      call('ZREM', P .. 'groups', name)
    elseif S.unit == 'trajectory' then
      oldest = end_whole_trajectory(name, reason, made, keys)
    else
      oldest = end_chunk_unit(name, reason, made)
    end
    call_many(keys, 'DEL')
    tally.unit(reason, oldest, made)
  end

  -- Remove an evaluation response, whose sample is recorded or which has failed.
  local function end_evaluation(tid, index)
    local cid = chunk_id(tid, index)
    forget_chunk(cid)
    call('DEL', chunk_key(cid), trajectory_key(tid))
  end

  left = {
    chunk = forget_chunk, trajectory = end_bare_trajectory, unit = end_unit, evaluation = end_evaluation,
    num_chunks = function() return num_chunks end,
    forget_finished = forget_finished, discard_finished = discard_finished, spoil_trajectory = spoil_trajectory,
  }
  return left
end
