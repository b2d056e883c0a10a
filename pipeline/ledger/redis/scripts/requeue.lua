-- requeue.lua: put work back: what is leased to open, what is unscored to due.
--
-- Reads    epochs trajectory:* chunk:*
-- Writes   held:* open evaluation_open running_age trajectory:* due:*
-- ARGV[4]  'worker', 'trajectories' or 'field'   ARGV[5..]  the worker, the trajectories, the field
-- Returns  { opened, made due, unknown name, ... }; with an unknown name nothing has changed

local opened, due, unknown = 0, 0, {}
if ARGV[4] == 'worker' and call('HEXISTS', P .. 'epochs', ARGV[5]) == 0 then unknown = { ARGV[5] } end
if ARGV[4] == 'trajectories' then
  for i = 5, #ARGV do
    if call('EXISTS', trajectory_key(ARGV[i])) == 0 then unknown[#unknown + 1] = ARGV[i] end
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

if ARGV[4] == 'worker' then
  for _, who in ipairs(call('ZRANGE', P .. 'holders', 0, -1)) do
    if string.match(who, '^(.*)#%d+$') == ARGV[5] then opened = opened + reopen_all(who) end
  end
elseif ARGV[4] == 'field' then
  for _, cid in ipairs(call('ZRANGE', P .. 'due:' .. ARGV[5], 0, -1)) do make_due(ARGV[5], cid) end
else
  for i = 5, #ARGV do
    local t = call('HMGET', trajectory_key(ARGV[i]), 'holder', 'next')
    if t[1] then
      reopen(ARGV[i], t[1])
      opened = opened + 1
    end
    for index = 0, integer(t[2]) - 1 do
      for _, field in ipairs(FIELDS) do make_due(field, chunk_id(ARGV[i], index)) end
    end
  end
end
return { opened, due }
