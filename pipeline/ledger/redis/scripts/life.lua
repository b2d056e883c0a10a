-- life.lua: what happened to one trajectory, in the ledger or among the newest that have left.
--
-- Uses     beginning counts credit lives names
-- Reads    settings counters lives lives_order groups group:<n> trajectory:<id> chunk:* parked
-- ARGV[4]  trajectory  text
-- Returns  { packed life }, or, when it is not known, { '', group size, groups admitted, first and last group in
--          the ledger or '', oldest and newest life or '' }

local trajectory = ARGV[4]
local tid = trajectory
local kept = call('HGET', P .. 'lives', tid)
if kept then return { kept } end
local key = trajectory_key(tid)
local t = call('HMGET', key, unpack(LIFE_FIELDS))
if not t[4] then
  return {
    '', S.group_size, nth_group(counter('groups:admitted')), call('ZRANGE', P .. 'groups', 0, 0)[1] or '',
    call('ZRANGE', P .. 'groups', -1, -1)[1] or '', call('LINDEX', P .. 'lives_order', -1) or '',
    call('LINDEX', P .. 'lives_order', 0) or '',
  }
end

local _, group = parts(tid)
local g, unit = {}, key
if not is_evaluation(tid) then
  g = call('HMGET', group_key(group), unpack(GROUP_FIELDS))
  if S.unit == 'group' then
    unit = group_key(group)
    t[6], t[7] = g[6], g[7]
  end
end
local state = (S.unit ~= 'chunk' and call('HGET', unit, 'state')) or (t[2] and 'finished') or (t[1] and 'leased')
  or (S.unit == 'chunk' and call('ZSCORE', P .. 'parked', tid) and 'parked') or 'open'
local rows, chunks = {}, integer(t[4])
for index = 0, chunks - 1 do
  if is_shown(index, chunks) then
    local c = call('HMGET', chunk_key(chunk_id(tid, index)), unpack(CHUNK_FIELDS))
    if c[1] then
      rows[#rows + 1] = chunk_row(index, c)
    else
      local past = call('HGET', key, past_field(index))
      if past then rows[#rows + 1] = cmsgpack.unpack(past) end
    end
  end
end
return { pack_life(tid, state, t, g, rows) }
