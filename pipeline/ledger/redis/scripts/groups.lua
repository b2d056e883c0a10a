-- groups.lua: the oldest groups with incomplete members. Each group is found by one lookup in the running
-- or parked queue, so the cost does not grow with the ledger.
--
-- Uses     beginning lacking names
-- Reads    settings groups group:<n> running parked trajectory:* chunk:* due:*
-- ARGV[4]  most     integer  groups to return
-- ARGV[5]  looks    integer  stop after the group with which this many chunks were read
-- ARGV[6]  start    integer  lowest group number
-- Returns  { unit, group size, groups, running units,
--            { { group, prompt, age or '', members done, members that left, judge or '',
--                { row of lacking.lua for each other member } }, ... },
--            chunks read, the next open group or '' }

local most, looks, start = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local SCALE = (S.unit == 'group' and 1) or (S.unit == 'trajectory' and S.group_size) or S.group_size * MAX_CHUNKS

-- Return the first group from this number on that has something in the queue.
local function first_in(queue, scale, from)
  local name = call('ZRANGEBYSCORE', P .. queue, string.format('%.0f', from * scale), '+inf', 'LIMIT', 0, 1)[1]
  return name and tonumber(string.match(name, '^t%.(%d+)') or name)
end

local function next_open(from)
  local running = first_in('running', SCALE, from)
  local parked = S.unit == 'chunk' and first_in('parked', S.group_size, from)
  return (running and parked and math.min(running, parked)) or running or parked
end

local groups, looked = {}, 0
local group = next_open(start)
while group and #groups < most and looked < looks do
  local name = string.format('%d', group)
  local g = call('HMGET', group_key(name), 'prompt', 'admitted_s', 'judged_by')
  local rows, done, left = {}, 0, 0
  for member = 0, S.group_size - 1 do
    local tid = member_of(name, member)
    local chunks = call('HGET', trajectory_key(tid), 'next')
    if chunks then
      looked = looked + tonumber(chunks)
      local row = trajectory_row(tid)
      if row then rows[#rows + 1] = row else done = done + 1 end
    else
      left = left + 1
    end
  end
  groups[#groups + 1] = { group, tonumber(g[1]) or group, g[2] and text(now - tonumber(g[2])) or '', done, left, g[3] or '', rows }
  group = next_open(group + 1)
end
return { S.unit, S.group_size, call('ZCARD', P .. 'groups'), call('ZCARD', P .. 'running'), groups, looked, group or '' }
