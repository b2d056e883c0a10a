-- telling.lua: write a topic's news.

-- Any worker's token may write news. One with the highest id there is leaves none for the next,
-- so the stream begins anew; readers compare ids when they have waited for long.
local function tell(news, field, value)
  local told = redis.pcall('XADD', news, 'MAXLEN', 1, '*', field, value)
  if type(told) == 'table' and told.err then
    redis.call('DEL', news)
    redis.call('XADD', news, 'MAXLEN', 1, '*', field, value)
  end
end
