-- set_run_status.lua: replace the run's state, at a server's memory limit too (see register.lua).
--
-- Uses     telling
-- KEYS[1]  run_status  string
-- KEYS[2]  run_news    stream  one entry
-- ARGV[1]  status      bytes   JSON
-- Returns  1

local run_status, run_news, status = KEYS[1], KEYS[2], ARGV[1]
redis.call('DEL', run_status)
redis.call('SET', run_status, status)
tell(run_news, 'changed', 1)
return 1
