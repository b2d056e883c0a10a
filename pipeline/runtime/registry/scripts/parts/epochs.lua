-- epochs.lua: a worker's newest epoch. Any worker's token may write to this key.

-- Return it as text: '0' for an unknown worker, '' if it is not an epoch. Then its incarnations are
-- fenced, and the next one gets epoch_by_time, which is above all earlier epochs.
local function newest_epoch(epochs, worker)
  local found = redis.call('HGET', epochs, worker)
  if not found then return '0' end
  return #found <= 15 and string.match(found, '^%d+$') or ''
end

-- Return the time in tenths of a millisecond, as text.
local function epoch_by_time()
  local time = redis.call('TIME')
  return string.format('%.0f', time[1] * 10000 + math.floor(time[2] / 100))
end
