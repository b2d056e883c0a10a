-- set_fleet.lua: replace the desired fleet, even at a server's memory limit (see register.lua).
--
-- Uses     telling
-- KEYS[1]  fleet     string
-- KEYS[2]  run_news  stream  one entry
-- ARGV[1]  wanted    bytes   JSON
-- ARGV[2]  present   bytes   the fleet to be replaced; empty if none
-- ARGV[3]  is_any    flag    replace any fleet
-- Returns  1; 0 when there is another fleet, which stays

local fleet, run_news = KEYS[1], KEYS[2]
local wanted, present, is_any = ARGV[1], ARGV[2], ARGV[3] == '1'
if not is_any and (redis.call('GET', fleet) or '') ~= present then
  return 0
end
redis.call('DEL', fleet)
redis.call('SET', fleet, wanted)
tell(run_news, 'changed', 1)
return 1
