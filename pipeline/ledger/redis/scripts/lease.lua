-- lease.lua: lease trajectories to an incarnation: evaluation first, then open ones, then new groups.
--
-- Uses     beginning counts credit holding lives many names prompts reopening requests versions
-- Reads             paused
-- Reads and writes  settings counters epochs holders held:* asked:<who> open parked again
--                   evaluation_open evaluation:<n> groups group:<n> trajectory:* chunk:* running
--                   running_age
-- ARGV[4]  wanted   integer   how many at most
-- ARGV[5]  request  integer   its number
-- ARGV[6]  version  integer?  with which the caller samples; '' for the published one. A caller that
--                             is behind only gets evaluation
-- Returns  { refusal or '', { trajectory, next index, prompt, last chunk or '', evaluation request
--          or '', the last chunk's turn or '' }, ... }

local wanted, request, version = tonumber(ARGV[4]), ARGV[5], tonumber(ARGV[6])
local is_behind = version and version < counter('version')

local prompts = {}

local function row(tid, next_index)
  local blob, asked, turn = '', '', ''
  if next_index > 0 then
    local last = call('HMGET', chunk_key(chunk_id(tid, next_index - 1)), 'blob', 'turn')
    if not last[1] then last = call('HMGET', trajectory_key(tid), 'last', 'last_turn') end
    blob, turn = last[1], last[2] or ''
  end
  local lane, group = parts(tid)
  local prompt = group
  if is_evaluation(tid) then
    asked = call('HGET', P .. 'evaluation:' .. string.sub(lane, 2), 'request')
  else
    prompts[group] = prompts[group] or prompt_of(group)
    prompt = prompts[group]
  end
  return { tid, next_index, prompt, blob, asked, turn }
end

local order = order_of('lease', request)
if order == 'late' then return LATE end
if order == 'again' then
  local last = call('HMGET', ASKED, 'lease:refusal', 'lease:trajectories')
  local reply = { last[1] }
  for tid in string.gmatch(last[2], '%S+') do
    if call('SISMEMBER', P .. 'held:' .. WHO, tid) == 1 then
      reply[#reply + 1] = row(tid, integer(call('HGET', trajectory_key(tid), 'next')))
    end
  end
  return reply
end

-- The first write may need memory, so that a full server refuses the whole lease. It also is a sign of
-- life: a caller that was silent for too long keeps what nobody has taken yet.
touch(WHO)

-- Holders that were silent for too long, or have a newer incarnation, lose what they hold.
for _, holder in ipairs(call('ZRANGEBYSCORE', P .. 'holders', '-inf', now)) do
  reopen_all(holder)
  call('ZREM', P .. 'holders', holder)
end
for _, holder in ipairs(call('ZRANGE', P .. 'holders', 0, -1)) do
  local its_worker, its_epoch = string.match(holder, '^(.*)#(%d+)$')
  if not its_worker or newest_epoch(its_worker) > tonumber(its_epoch) then
    reopen_all(holder)
    call('ZREM', P .. 'holders', holder)
  end
end

local function admit_group()
  local number = counter('groups:admitted')
  local why = refusal(S.group_size)
  if why ~= 'closed' then
    if is_exhausted() then why = 'exhausted' elseif call('EXISTS', P .. 'paused') == 1 then why = 'paused' end
  end
  if why then return why end
  local name = string.format('%d', number)
  local again = call('ZRANGE', P .. 'again', 0, 0)[1]
  call('HSET', group_key(name), 'live', S.group_size, 'admitted_s', now_text, 'prompt',
    again or counter('groups:admitted') - counter('groups:again'))
  if again then
    call('ZREM', P .. 'again', again)
    count('groups:again', 1)
  end
  call('ZADD', P .. 'groups', number, name)
  if S.unit == 'group' then call('ZADD', P .. 'running', number, name) end
  local open, running = {}, {}
  for member = 0, S.group_size - 1 do
    local tid = member_of(name, member)
    call('HSET', trajectory_key(tid), 'next', 0, 'since', now_text)
    open[#open + 1] = trajectory_order(tid)
    open[#open + 1] = tid
    if S.unit == 'chunk' then
      running[#running + 1] = chunk_order(tid, 0)
      running[#running + 1] = chunk_id(tid, 0)
    end
  end
  call_many(open, 'ZADD', P .. 'open')
  if S.unit == 'trajectory' then running = open end
  call_many(running, 'ZADD', P .. 'running')
  count('groups:admitted', 1)
  count('trajectories:admitted', S.group_size)
  count('used', S.group_size)
  return nil
end

-- Return the first open trajectory, with its order. While the learner repeats updates after going back,
-- new tokens would be too old when their turn comes; then return the first one whose unit does not grow
-- older by it, so that the learner need not wait for that unit. With too little ready, return the first.
local OPEN_PAGE = 500
local num_passed_over = 0
local function first_open()
  local is_catching_up = counter('used') > credit_limit() and call('ZCARD', P .. 'ready') * WEIGHT >= S.batch
  if not is_catching_up then return call('ZRANGE', P .. 'open', 0, 0, 'WITHSCORES') end
  local updates = published_updates()
  while true do
    local open = call('ZRANGE', P .. 'open', num_passed_over, num_passed_over + OPEN_PAGE - 1, 'WITHSCORES')
    for i = 1, #open, 2 do
      local tid = open[i]
      local unit = tid
      if S.unit == 'group' then
        local _, group = parts(tid)
        unit = string.format('%d', group)
      elseif S.unit == 'chunk' then
        unit = chunk_id(tid, integer(call('HGET', trajectory_key(tid), 'next')))
      end
      local age = call('ZSCORE', P .. 'running_age', unit)
      if age and tonumber(age) <= updates then return { tid, open[i + 1] } end
      -- ages only change once everything is leased, so skipped ones stay skipped in this call
      num_passed_over = num_passed_over + 1
    end
    if #open < 2 * OPEN_PAGE then return {} end
  end
end

-- Return the next trajectory, removed from its queue, or nil and why there is none.
local has_evaluation = true
local function take()
  local evaluation = has_evaluation and call('ZRANGE', P .. 'evaluation_open', 0, 0)[1]
  if evaluation then
    call('ZREM', P .. 'evaluation_open', evaluation)
    return evaluation
  end
  has_evaluation = false
  if is_behind then return nil, 'behind' end
  local open = first_open()
  local parked = S.unit == 'chunk' and call('ZRANGE', P .. 'parked', 0, 0, 'WITHSCORES') or {}
  if parked[1] and not (open[1] and tonumber(open[2]) < tonumber(parked[2])) then
    local why = refusal(1)
    if not why then
      local tid = parked[1]
      local index = integer(call('HGET', trajectory_key(tid), 'next'))
      call('ZREM', P .. 'parked', tid)
      call('ZADD', P .. 'running', chunk_order(tid, index), chunk_id(tid, index))
      count('used', 1)
      return tid
    end
    if not open[1] then return nil, why end
  end
  if not open[1] then
    local why = admit_group()
    if why then return nil, why end
    open = call('ZRANGE', P .. 'open', 0, 0)
  end
  call('ZREM', P .. 'open', open[1])
  return open[1]
end

local reply, names, held, refused = { '' }, {}, {}, nil
local event = string.gsub(WHO, '[\t\n]', ' ') .. ' ' .. now_text
while #names < wanted do
  local tid
  tid, refused = take()
  if not tid then break end
  local key = trajectory_key(tid)
  local t = call('HMGET', key, 'next', 'leases', 'oldest')
  local next_index, leases = integer(t[1]), integer(t[2])
  call('HSET', key, 'holder', WHO, 'since', now_text, 'leases', leases + 1, 'lease:' .. leases % MAX_LEASES, event)
  names[#names + 1] = tid
  held[#held + 1] = { tid, next_index, t[3] }
  reply[#reply + 1] = row(tid, next_index)
end
call_many(names, 'SADD', P .. 'held:' .. WHO)
begin_ages(held)
reply[1] = refused or ''
remember('lease', request, 'lease:refusal', reply[1], 'lease:trajectories', table.concat(names, ' '))
return reply
