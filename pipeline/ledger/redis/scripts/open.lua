-- open.lua: create a run's ledger, or join an existing one.
--
-- KEYS[1]  spec      hash
-- KEYS[2]  settings  string
-- ARGV[1]  packed    bytes  the settings that all other scripts read
-- ARGV[2..]  texts   text   of the specification: setting, text, ...
-- Returns  the specification with which the ledger was created
-- Errors   OLDER: an earlier release created this ledger

local spec, settings = KEYS[1], KEYS[2]
local packed, texts = ARGV[1], {}
for i = 2, #ARGV do texts[#texts + 1] = ARGV[i] end
if redis.call('EXISTS', spec) == 0 then
  redis.call('HSET', spec, unpack(texts))
  redis.call('SET', settings, packed)
elseif redis.call('EXISTS', settings) == 0 then
  return redis.error_reply('OLDER an earlier release made this ledger; finish its run with that release, or start another')
end
return redis.call('HGETALL', spec)
