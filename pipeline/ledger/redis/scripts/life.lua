-- life.lua: the history of a trajectory that is in the ledger or among the newest that have left.
--
-- Uses     beginning counts lives names
-- Reads    settings counters lives lives_order groups group:<n> trajectory:<id> chunk:* parked
-- ARGV[4]  trajectory  text
-- Returns  { life } or, if it is unknown, { '', group size, groups admitted, first and last group in the
--          ledger or '', oldest and newest life or '' }

local trajectory = ARGV[4]
local tid = trajectory
local kept = call('HGET', P .. 'lives', tid)
if kept then return { kept } end
local key = trajectory_key(tid)
local t = lives().trajectory(tid)
if not t[4] then
  return {
    '', S.group_size, counter('groups:admitted'), call('ZRANGE', P .. 'groups', 0, 0)[1] or '',
    call('ZRANGE', P .. 'groups', -1, -1)[1] or '', call('LINDEX', P .. 'lives_order', -1) or '',
    call('LINDEX', P .. 'lives_order', 0) or '',
  }
end

local _, group = parts(tid)
local g, unit = {}, key
if not is_evaluation(tid) then
  g = lives().group(group)
  if S.unit == 'group' then
    unit = group_key(group)
  end
end
local state = (S.unit ~= 'chunk' and call('HGET', unit, 'state')) or (HAS_TURNS and call('HGET', key, 'state'))
  or (t[2] and 'finished') or (t[1] and 'leased')
  or (S.unit == 'chunk' and call('ZSCORE', P .. 'parked', tid) and 'parked') or 'open'
local rows, chunks = {}, integer(t[4])
for index = 0, chunks - 1 do
  if lives().is_shown(index, chunks) then
    local c = lives().chunk(chunk_id(tid, index))
    if c[1] then
      rows[#rows + 1] = lives().row(string.format('%d', index), c)
    else
      rows[#rows + 1] = call('HGET', key, lives().past_field(index)) or nil
    end
  end
end
return { lives().life(tid, state, t, g, rows) }
