-- cancel.lua: drop everything untrained, claims included, one batch per call. If the run goes on later,
-- the prompts of groups with nothing trained are admitted again. The evaluation lane is not touched, nor
-- what the value worker has claimed: it has trained on it and will settle it.
--
-- Groups leave one by one, each whole and removed from its claims. If the caller dies between two calls,
-- these groups are gone, and no claim refers to them.
--
-- Uses     beginning counts leaving names prompts ready requests
-- Writes   everything in the training lane and everything kept for the value worker; asked:<who>
-- ARGV[4]  request  integer  its number
-- ARGV[5]  reason   text
-- ARGV[6]  most     integer  chunks and finished trajectories to remove; the last group may exceed it
-- ARGV[7]  last     integer? the last group; '' at the first call, for the groups present then
-- Returns  { number of groups ended, 1 to call again or 0, the last group }

local request, reason, most, last = ARGV[4], ARGV[5], tonumber(ARGV[6]), tonumber(ARGV[7])
local order = order_of('cancel', request)
if order == 'late' then return LATE end
if order == 'again' then return remembered('cancel:ended', 'cancel:more', 'cancel:last') end
allow_growth()

local claims = call('HKEYS', P .. 'claims')
local function unclaim(name)
  if call('HGET', unit_key(name), 'state') ~= 'claimed' then return end
  for _, id in ipairs(claims) do call('ZREM', P .. 'claim:' .. id, name) end
end

-- Chunk units: the stored chunks, then the credit of the next window, then the trajectory itself.
local function cancel_trajectory(tid)
  local next_index = call('HGET', trajectory_key(tid), 'next')
  if not next_index then return end
  leaving().discard_finished(tid, reason)
  for index = 0, tonumber(next_index) - 1 do
    local cid = chunk_id(tid, index)
    if call('EXISTS', chunk_key(cid)) == 1 then
      unclaim(cid)
      leaving().unit(cid, reason)
    end
  end
  local granted = chunk_id(tid, next_index)
  if call('ZREM', P .. 'running', granted) == 1 then
    call('ZREM', P .. 'running_age', granted)
    count('used', -1)
  end
  local key = trajectory_key(tid)
  if call('EXISTS', key) == 1 then
    local trained = call('HGET', key, 'trained')
    if trained then leaving().trajectory(tid, nil) else leaving().trajectory(tid, reason) end
  end
end

local function is_untrained(group)
  if S.unit == 'group' then return true end
  local g = call('HMGET', group_key(group), 'live', 'dropped')
  if S.group_size > integer(g[1]) + integer(g[2]) then return false end
  if S.unit == 'trajectory' then return true end
  for member = 0, S.group_size - 1 do
    if call('HEXISTS', trajectory_key(member_of(group, member)), 'trained') == 1 then return false end
  end
  return true
end

last = last or tonumber(call('ZRANGE', P .. 'groups', -1, -1)[1] or '-1')
local ended, more = 0, 0
for _, group in ipairs(call('ZRANGEBYSCORE', P .. 'groups', '-inf', string.format('%d', last), 'LIMIT', 0, most + 1)) do
  if leaving().num_chunks() + ended >= most then
    more = 1
    break
  end
  ended = ended + 1
  if is_untrained(group) then
    local prompt = prompt_of(group)
    call('ZADD', P .. 'again', prompt, string.format('%d', prompt))
  end
  if S.unit == 'group' then
    for member = 0, S.group_size - 1 do leaving().discard_finished(member_of(group, member), reason) end
    unclaim(group)
    leaving().unit(group, reason)
  else
    for member = 0, S.group_size - 1 do
      local tid = member_of(group, member)
      if S.unit == 'chunk' then
        cancel_trajectory(tid)
      elseif call('EXISTS', trajectory_key(tid)) == 1 then
        leaving().discard_finished(tid, reason)
        unclaim(tid)
        leaving().unit(tid, reason)
      end
    end
  end
end
if more == 0 then
  for _, tid in ipairs(call('ZRANGE', P .. 'finished', 0, most - 1)) do leaving().discard_finished(tid, reason) end
  if call('EXISTS', P .. 'finished') == 1 then more = 1 end
end
if more == 0 then
  for _, id in ipairs(claims) do call('DEL', P .. 'claim:' .. id) end
  call('DEL', P .. 'claims')
end
remember('cancel', request, 'cancel:ended', ended, 'cancel:more', more, 'cancel:last', last)
return { ended, more, last }
