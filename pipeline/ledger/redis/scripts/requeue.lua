-- requeue.lua: requeue work: reopen leased trajectories, make unscored chunks due.
--
-- Uses     beginning names reopening
-- Reads    epochs trajectory:* chunk:*
-- Writes   held:* open evaluation_open running_age trajectory:* due:*
-- ARGV[4]  what     text     'worker', 'trajectories' or 'field'
-- ARGV[5]  most     integer  chunks of a field to make due; the caller repeats until there are fewer
-- ARGV[6..]  names  text  the worker, the trajectories or the field
-- Returns  { reopened, made due, unknown name, ... }; with an unknown name nothing has changed. For a
--          field: { 0, how many this call made due, how many are due or will be }

local what, most, names = ARGV[4], tonumber(ARGV[5]), {}
for i = 6, #ARGV do names[#names + 1] = ARGV[i] end
local opened, due, unknown = 0, 0, {}
if what == 'worker' and call('HEXISTS', P .. 'epochs', names[1]) == 0 then unknown = { names[1] } end
if what == 'trajectories' then
  for _, tid in ipairs(names) do
    if call('EXISTS', trajectory_key(tid)) == 0 then unknown[#unknown + 1] = tid end
  end
end
if #unknown > 0 then return { 0, 0, unpack(unknown) } end
allow_growth()

local function make_due(field, cid)
  local at = call('ZSCORE', P .. 'due:' .. field, cid)
  if not at then return end
  if tonumber(at) > now then call('ZADD', P .. 'due:' .. field, now, cid) end
  due = due + 1
end

if what == 'worker' then
  for _, who in ipairs(call('ZRANGE', P .. 'holders', 0, -1)) do
    if string.match(who, '^(.*)#%d+$') == names[1] then opened = opened + reopen_all(who) end
  end
elseif what == 'field' then
  local key = P .. 'due:' .. names[1]
  local later = call('ZRANGEBYSCORE', key, string.format('(%.17g', now), '+inf', 'LIMIT', 0, most)
  for _, cid in ipairs(later) do call('ZADD', key, now, cid) end
  return { 0, #later, call('ZCARD', key) }
else
  for _, tid in ipairs(names) do
    local t = call('HMGET', trajectory_key(tid), 'holder', 'next')
    if t[1] then
      reopen(tid, t[1])
      opened = opened + 1
    end
    for index = 0, integer(t[2]) - 1 do
      for _, field in ipairs(FIELDS) do make_due(field, chunk_id(tid, index)) end
    end
  end
end
return { opened, due }
