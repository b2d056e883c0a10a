-- add_settings_change.lua: append a change of the run's settings, if it is the next one. The LTRIM
-- removes nothing, but after it a server at its memory limit accepts the rest (see register.lua).
--
-- Uses     telling
-- KEYS[1]  settings_changes  list    one JSON object per change; the first is number 1
-- KEYS[2]  run_news          stream  one entry
-- ARGV[1]  change            bytes   JSON
-- ARGV[2]  number            number  of the change
-- Returns  1; 0 when another change has this number, and nothing was appended

local settings_changes, run_news = KEYS[1], KEYS[2]
local change, number = ARGV[1], tonumber(ARGV[2])
if redis.call('LLEN', settings_changes) ~= number - 1 then
  return 0
end
redis.call('LTRIM', settings_changes, 0, -1)
redis.call('RPUSH', settings_changes, change)
tell(run_news, 'changed', 1)
return 1
