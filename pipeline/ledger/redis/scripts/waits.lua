-- waits.lua: what the next update waits for: units that have credit but are not ready, what they lack and
-- which incarnations have them.
--
-- Uses     beginning counts lacking names
-- Reads    settings counters running running_age ready parked claims claim:* holders held:* due:*
--          group:* trajectory:* chunk:*
-- ARGV[4]  most     integer  units to return
-- Returns  { { unit, group size, eta, late, version, needed, ready, running, parked, claimed,
--              evaluation open, value training },
--            { { unit, oldest version or '', complete trajectories,
--                { { trajectory, place, holder or '', chunks, tokens, since, { { field, chunks,
--                    first chunk, age, overdue, failures }, ... } }, ... } }, ... },
--            { { holder, trajectories, of them evaluation, seconds left }, ... } }

local function unit_row(name)
  local rows, complete = {}, 0
  local function add(tid, only)
    local row = trajectory_row(tid, only)
    if row then rows[#rows + 1] = row else complete = complete + 1 end
  end
  if S.unit == 'group' then
    for member = 0, S.group_size - 1 do add(member_of(name, member)) end
  elseif S.unit == 'trajectory' then
    add(name)
  else
    add(chunk_parts(name))
  end
  return { name, call('ZSCORE', P .. 'running_age', name) or '', complete, rows }
end

local most = tonumber(ARGV[4])
local needed, ready = S.batch / WEIGHT, call('ZCARD', P .. 'ready')
local index = (ready >= needed and S.late == 'wait') and 'running_age' or 'running'
local units = {}
for _, name in ipairs(call('ZRANGE', P .. index, 0, most - 1)) do units[#units + 1] = unit_row(name) end

local holders = {}
for _, who in ipairs(call('ZRANGE', P .. 'holders', 0, -1)) do
  local held, evaluation = call('SMEMBERS', P .. 'held:' .. who), 0
  for _, tid in ipairs(held) do if is_evaluation(tid) then evaluation = evaluation + 1 end end
  if #held > 0 then
    holders[#holders + 1] = { who, #held, evaluation, text(tonumber(call('ZSCORE', P .. 'holders', who)) - now) }
  end
end

local claimed = 0
for _, id in ipairs(call('HKEYS', P .. 'claims')) do claimed = claimed + call('ZCARD', P .. 'claim:' .. id) end

return {
  { S.unit, S.group_size, S.eta, S.late, counter('version'), needed, ready, call('ZCARD', P .. 'running'),
    call('ZCARD', P .. 'parked'), claimed, call('ZCARD', P .. 'evaluation_open'), S.value_training and 1 or 0 },
  units, holders,
}
