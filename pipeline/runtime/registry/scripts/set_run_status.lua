-- set_run_status.lua: replace the run's state, even at a server's memory limit (see register.lua).
--
-- Uses     telling
-- KEYS[1]  run_status  string
-- KEYS[2]  run_news    stream  one entry
-- ARGV[1]  status      bytes   JSON
-- ARGV[2]  present     bytes   the state to be replaced; empty if none
-- ARGV[3]  is_any      flag    replace any state
-- Returns  1; 0 when there is another state, which stays

local run_status, run_news = KEYS[1], KEYS[2]
local status, present, is_any = ARGV[1], ARGV[2], ARGV[3] == '1'
if not is_any and (redis.call('GET', run_status) or '') ~= present then
  return 0
end
redis.call('DEL', run_status)
redis.call('SET', run_status, status)
tell(run_news, 'changed', 1)
return 1
