-- lives.lua: packs the life of a trajectory into a text, and keeps those of the newest that have left.
-- pipeline/ledger/life.py parses the text and lists its fields. Tabs and newlines separate the fields, so
-- they are replaced by spaces in workers' texts. The functions are created when a transition first needs
-- one, since most never do.
--
-- Uses     beginning counts many names

local MAX_LEASES = 4

local living
local function lives()
  if living then return living end

  local MAX_LIVES, EITHER_END = 10000, 32
  -- Fields of a trajectory and of a chunk, in the order in which the texts below use them. Those that this
  -- kind of unit, or a run with only rewards, does not have are left out.
  local trajectory_fields = { 'holder', 'final', 'tokens', 'next', 'oldest', 'leases', 'lease:0' }
  if S.unit == 'trajectory' then
    trajectory_fields[8], trajectory_fields[9] = 'ready_s', 'claimed_s'
  end
  local chunk_fields = { 'tokens', 'bytes', 'oldest', 'written_s', 'by', 'from:reward' }
  if S.fields ~= 'reward' or S.unit == 'chunk' then
    for _, field in ipairs({ 'from:reference', 'from:value', 'ready_s', 'claimed_s' }) do chunk_fields[#chunk_fields + 1] = field end
  end
  if HAS_GUIDANCE or HAS_TURNS then chunk_fields[11] = 'from:guidance' end
  if HAS_TURNS then chunk_fields[12] = 'from:turn' end

  local function read_group(group)
    return call('HMGET', group_key(group), 'admitted_s', 'prompt', 'scored', 'correct', 'oldest', 'ready_s', 'claimed_s')
  end
  local function read_trajectory(tid) return call('HMGET', trajectory_key(tid), unpack(trajectory_fields)) end
  local function read_chunk(cid) return call('HMGET', chunk_key(cid), unpack(chunk_fields)) end

  -- Return the trajectory's field for the row of a chunk that has left. In a long trajectory, the last rows
  -- overwrite each other.
  local function past_field(index)
    local place = index < EITHER_END and index or EITHER_END + index % EITHER_END
    return 'past:' .. string.format('%d', place)
  end

  -- Return the row of a chunk from its fields `c`. `place`: its index as text; `over`: how it ended, if it
  -- is a unit.
  local function chunk_row(place, c, over)
    return '\n' .. place .. '\t' .. (c[1] or '') .. '\t' .. (c[4] or '') .. '\t' .. (c[5] or '') .. '\t' .. (c[6] or '') .. '\t'
      .. (c[7] or '') .. '\t' .. (c[8] or '') .. '\t' .. (c[9] or '') .. '\t' .. (c[10] or '') .. '\t' .. (over or '')
      .. ((c[11] or c[12]) and '\t' .. (c[11] or '') or '') .. (c[12] and '\t' .. c[12] or '')
  end

  -- Whether a chunk's row is kept: of a long trajectory, only the first and the last ones.
  local function is_shown(index, chunks) return index < EITHER_END or index >= chunks - EITHER_END end

  -- Return how a unit ended: when, the updates in the version that counts and in its oldest token, and why
  -- ('' when trained).
  local counted_from, event
  local function unit_end(reason, made, oldest)
    if made ~= counted_from then counted_from, event = made, now_text .. ' ' .. made .. ' ' end
    return event .. (oldest or '') .. ' ' .. (reason and string.gsub(reason, '[\t\n]', ' ') or '')
  end

  -- Return the last leases of a trajectory that had several.
  local function last_leases(tid, number)
    local names = {}
    for place = math.max(0, number - MAX_LEASES), number - 1 do names[#names + 1] = 'lease:' .. place % MAX_LEASES end
    local found = call('HMGET', trajectory_key(tid), unpack(names))
    for i = 1, #names do found[i] = found[i] or '' end
    return table.concat(found, '\t')
  end

  -- Return a packed life. `t`: from read_trajectory; `g`: from read_group, for its group.
  local function life_of(tid, state, t, g, rows, over)
    local leases, number = t[7] or '', t[6] or '0'
    if number ~= '0' and number ~= '1' then leases = last_leases(tid, tonumber(number)) end
    return tid .. '\t' .. state .. '\t' .. (g[1] or '') .. '\t' .. (g[2] or '') .. '\t' .. (t[3] or '0') .. '\t'
      .. (g[6] or t[8] or '') .. '\t' .. (g[7] or t[9] or '') .. '\t' .. number .. '\t' .. t[4] .. '\t' .. (over or '') .. '\t'
      .. leases .. table.concat(rows)
  end

  local names, kept = {}, {}
  local function write()
    call_many(kept, 'HSET', P .. 'lives')
    call_many(names, 'LPUSH', P .. 'lives_order')
    local over = call('LLEN', P .. 'lives_order') - MAX_LIVES
    if over > 0 then
      call_many(call('LRANGE', P .. 'lives_order', -over, -1), 'HDEL', P .. 'lives')
      call('LTRIM', P .. 'lives_order', 0, MAX_LIVES - 1)
    end
    names, kept = {}, {}
  end

  -- Keep the life of a trajectory that leaves.
  local has_begun
  local function keep(tid, ...)
    if not has_begun then
      has_begun = true
      finishing = finishing or {}
      finishing[#finishing + 1] = write
    end
    names[#names + 1] = tid
    kept[#kept + 1] = tid
    kept[#kept + 1] = life_of(tid, ...)
    if #names >= MAX_LIVES then write() end
  end

  living = {
    group = read_group, trajectory = read_trajectory, chunk = read_chunk, row = chunk_row, past_field = past_field,
    is_shown = is_shown, unit_end = unit_end, life = life_of, keep = keep,
  }
  return living
end
