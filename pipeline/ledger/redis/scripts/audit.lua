-- audit.lua: read one batch of the work in flight. pipeline/ledger/redis/audit.py makes the calls, each
-- of which holds the server for milliseconds, and keeps the rows.
--
-- The sum of the rows is exact although work moves between the calls:
--
-- * A trajectory's work in flight changes only in transitions that write its name to `moved` in the
--   same atomic step (parts/counts.lua). A row stays true until the list names its trajectory again.
-- * The caller rereads all trajectories that the list has named since its first call. New groups are
--   not on the list, but their numbers are beyond those walked.
-- * The last call reads what the list has named since the previous call, the groups beyond, and the
--   counters, at one moment. If nothing is left over, every row is true at that moment.
--
-- Uses     beginning names
-- Reads    counters moved groups group:* trajectory:* chunk:* finished finished_claims finished_claim:*
--          finished:*
-- ARGV[4]  most     integer   chunks and trajectories read; the last trajectory may exceed it
-- ARGV[5]  since    integer?  position in `moved` at the previous call
-- ARGV[6]  group    integer   the walk continues with this group,
-- ARGV[7]  member   integer   and this member
-- ARGV[8]  is_last  flag      the caller has nothing else to read
-- ARGV[9..]  again  text      trajectories to read first
-- Returns  { position in `moved`, the walk's next group and member,
--            { { trajectory, its state or '', value worker's state or '', state, tokens, ... }, ... },
--            trajectories still to be read,
--            when the walk is over: groups in flight and { counters as name, value, ... } }
--          Nothing when more moved since the previous call than the list keeps, or when a server
--          without the newest writes has taken over

local most, since, group, member = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
local is_last = ARGV[8] == '1'
local PAGE = 100
local RANK = { open = 1, leased = 2, waiting = 3, finished = 4, ready = 5, claimed = 6 }
local read, rows, looks = {}, {}, 0

-- A chunk unit has its own state; chunks of larger units share their trajectory's.
local function read_chunks(row, tid, next_index, shared)
  local found, least = {}, nil
  for index = 0, next_index - 1 do
    local c = call('HMGET', chunk_key(chunk_id(tid, index)), 'tokens', 'state')
    if c[1] then
      local state = shared or c[2] or 'finished'
      found[state] = (found[state] or 0) + tonumber(c[1])
      if not least or RANK[state] < RANK[least] then least = state end
    end
  end
  for state, tokens in pairs(found) do
    row[#row + 1] = state
    row[#row + 1] = tokens
  end
  looks = looks + next_index
  return least
end

-- State of the trajectory for the value worker.
local function finished_state(tid)
  if not S.value_training then return '' end
  local f = call('HMGET', finished_key(tid), 'state', 'claim')
  if not f[1] then return '' end
  if call('ZSCORE', P .. 'finished', tid) then return 'waiting' end
  local is_claimed = f[2] and call('SISMEMBER', P .. 'finished_claims', f[2]) == 1
  return is_claimed and call('ZSCORE', P .. 'finished_claim:' .. f[2], tid) and 'claimed' or ''
end

-- `unit_state`: of its group, '' if it has none; false if the group is gone.
local function read_trajectory(tid, unit_state)
  read[tid] = true
  looks = looks + 1
  local row = { tid, '', finished_state(tid) }
  rows[#rows + 1] = row
  local t = call('HMGET', trajectory_key(tid), 'next', 'holder', 'final', 'state')
  if not (t[1] and unit_state) then return end
  local state = (unit_state ~= '' and unit_state) or t[4] or (t[3] and 'finished') or (t[2] and 'leased') or 'open'
  local least = read_chunks(row, tid, tonumber(t[1]), S.unit ~= 'chunk' and state or nil)
  row[2] = S.unit == 'chunk' and t[3] and least or state
end

local function state_of(name) return call('HGET', group_key(name), 'state') or '' end

local function read_again(tid)
  local _, number = parts(tid)
  local name = string.format('%d', number)
  read_trajectory(tid, call('ZSCORE', P .. 'groups', name) and state_of(name))
end

local left = {}
local function read_or_leave(tid, is_now)
  if is_now and looks < most then
    read_again(tid)
  else
    read[tid] = true
    left[#left + 1] = tid
  end
end

for i = 9, #ARGV do read_or_leave(ARGV[i], true) end

local is_walked = false
while looks < most and not is_walked do
  local page = call('ZRANGEBYSCORE', P .. 'groups', string.format('%d', group), '+inf', 'LIMIT', 0, PAGE)
  for _, name in ipairs(page) do
    if looks >= most then break end
    local number = tonumber(name)
    if number ~= group then member = 0 end
    local unit_state = state_of(name)
    while member < S.group_size and looks < most do
      read_trajectory(member_of(name, member), unit_state)
      member = member + 1
    end
    group = number
    if member >= S.group_size then
      group, member = number + 1, 0
    end
  end
  is_walked = #page < PAGE and looks < most
end

local moved = integer(call('HGET', COUNTERS, 'moved'))
local number = moved - (since or moved)
if number < 0 or number > call('LLEN', P .. 'moved') then return false end
for _, tid in ipairs(number > 0 and call('LRANGE', P .. 'moved', 0, number - 1) or {}) do
  if not read[tid] then read_or_leave(tid, is_walked and is_last) end
end

local reply = { moved, group, member, rows, left }
if is_walked and is_last and #left == 0 then
  reply[6] = call('ZCARD', P .. 'groups')
  reply[7] = call('HGETALL', COUNTERS)
end
return reply
