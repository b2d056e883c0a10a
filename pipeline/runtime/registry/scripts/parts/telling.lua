-- telling.lua: writes a topic's notification.

-- Any worker's token may write notifications. An entry with the highest possible id leaves none for the next,
-- so the stream is then recreated; readers compare ids after a long wait.
local function tell(news, field, value)
  local told = redis.pcall('XADD', news, 'MAXLEN', 1, '*', field, value)
  if type(told) == 'table' and told.err then
    redis.call('DEL', news)
    redis.call('XADD', news, 'MAXLEN', 1, '*', field, value)
  end
end
