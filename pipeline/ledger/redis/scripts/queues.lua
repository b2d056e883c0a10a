-- queues.lua: the depth, limit and oldest age of every ledger queue.
--
-- Uses     beginning counts credit lacking names ready
-- Reads    counters open parked again holders held:* due:* ready claims finished finished_claims
--          evaluation_open dead, and the first entry of each
-- Returns  { name, depth, limit or -1, age of the oldest as text or '' } for each queue

local function age(since) return since and string.format('%.17g', now - tonumber(since)) or '' end

local function first(key) return call('ZRANGE', P .. key, 0, 0)[1] end

local function trajectories(name)
  local tid = first(name)
  return { name, call('ZCARD', P .. name), -1, tid and age(call('HGET', trajectory_key(tid), 'since')) or '' }
end

local limit = credit_limit()
local held = 0
for _, holder in ipairs(call('ZRANGE', P .. 'holders', 0, -1)) do held = held + call('SCARD', P .. 'held:' .. holder) end

local reply = {
  { 'credit', counter('used'), limit, '' }, trajectories('evaluation_open'), trajectories('open'), trajectories('parked'),
  { 'leased', held, -1, '' }, { 'again', call('ZCARD', P .. 'again'), -1, '' },
}
for _, field in ipairs(FIELDS) do
  if field == 'reward' or string.find(S.fields, field, 1, true) then
    local chunk = first('due:' .. field)
    local oldest = chunk and text(now - lacking_since(chunk, field)) or ''
    reply[#reply + 1] = { field, call('ZCARD', P .. 'due:' .. field), -1, oldest }
  end
end
if S.value_training then
  local finished = first('finished')
  reply[#reply + 1] = {
    'finished', call('ZCARD', P .. 'finished'), -1, finished and age(call('HGET', finished_key(finished), 'ready_s')) or '',
  }
  local taken = 0
  for _, id in ipairs(call('SMEMBERS', P .. 'finished_claims')) do
    taken = taken + call('ZCARD', P .. 'finished_claim:' .. id)
  end
  reply[#reply + 1] = { 'finished_claimed', taken, -1, '' }
end
local oldest = first('ready')
reply[#reply + 1] = {
  'ready', call('ZCARD', P .. 'ready') * WEIGHT, -1, oldest and age(call('HGET', unit_key(oldest), 'ready_s')) or '',
}
local claimed = 0
for _, id in ipairs(call('HKEYS', P .. 'claims')) do claimed = claimed + call('ZCARD', P .. 'claim:' .. id) * WEIGHT end
reply[#reply + 1] = { 'claimed', claimed, -1, '' }
reply[#reply + 1] = { 'dead', call('LLEN', P .. 'dead'), -1, '' }
reply[#reply + 1] = { 'bytes', counter('bytes'), S.max_bytes or -1, '' }
return reply
