-- lives.lua: what happened to a trajectory, packed, and kept for the newest that have left.
-- pipeline/ledger/life.py reads it and lists the places.
--
-- Uses     beginning counts many

local MAX_LIVES, MAX_LEASES, EITHER_END = 10000, 4, 32
-- of a trajectory and of a chunk, in the order in which the rows below take them
local LIFE_FIELDS = {
  'holder', 'final', 'tokens', 'next', 'oldest', 'ready_s', 'claimed_s', 'leases', 'lease:0', 'lease:1', 'lease:2', 'lease:3',
}
local CHUNK_FIELDS = {
  'tokens', 'bytes', 'oldest', 'written_s', 'by', 'from:reward', 'from:reference', 'from:value', 'ready_s', 'claimed_s',
}

local GROUP_FIELDS = { 'admitted_s', 'prompt', 'scored', 'correct', 'oldest', 'ready_s', 'claimed_s' }

-- Return the trajectory's field with the row of a chunk that has left. Of a long one the last rows
-- replace each other.
local function past_field(index)
  local place = index < EITHER_END and index or EITHER_END + index % EITHER_END
  return 'past:' .. string.format('%d', place)
end

local function known(value) return tonumber(value) or '' end

-- Return the row of a chunk from its CHUNK_FIELDS. `over`: how its unit ended, if it is a unit.
local function chunk_row(index, c, over)
  return { index, known(c[1]), known(c[4]), c[5] or '', { c[6] or '', c[7] or '', c[8] or '' }, known(c[9]), known(c[10]), over or '' }
end

-- Return whether a chunk's row is kept: of a long trajectory the first and the last ones are.
local function is_shown(index, chunks) return index < EITHER_END or index >= chunks - EITHER_END end

-- Return how a unit ended: when, why ('' when trained), the updates in the version that counts, and
-- in its oldest token.
local function unit_end(reason, made, oldest) return { now, reason or '', made, known(oldest) } end

-- Return a packed life. `t`: the trajectory's LIFE_FIELDS; `g`: its group's admitted_s and prompt.
local function pack_life(tid, state, t, g, rows, over)
  local leases, num_leases = {}, integer(t[8])
  for place = math.max(0, num_leases - MAX_LEASES), num_leases - 1 do leases[#leases + 1] = t[9 + place % MAX_LEASES] or '' end
  return cmsgpack.pack({
    tid, state, known(g[1]), known(g[2]), integer(t[3]), known(t[6]), known(t[7]), num_leases, leases, integer(t[4]), rows,
    over or '',
  })
end

local lived, packed_lives = {}, {}
local function write_lives()
  call_many(packed_lives, 'HSET', P .. 'lives')
  call_many(lived, 'LPUSH', P .. 'lives_order')
  local over = call('LLEN', P .. 'lives_order') - MAX_LIVES
  if over > 0 then
    call_many(call('LRANGE', P .. 'lives_order', -over, -1), 'HDEL', P .. 'lives')
    call('LTRIM', P .. 'lives_order', 0, MAX_LIVES - 1)
  end
  lived, packed_lives = {}, {}
end

-- Keep the life of a trajectory that leaves.
local function keep_life(tid, ...)
  if #lived == 0 then finishing[#finishing + 1] = write_lives end
  lived[#lived + 1] = tid
  packed_lives[#packed_lives + 1] = tid
  packed_lives[#packed_lives + 1] = pack_life(tid, ...)
  if #lived >= MAX_LIVES then
    write_lives()
    finishing = {}
  end
end
