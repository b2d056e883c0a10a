-- Publish a policy version, unless the caller is fenced or the version is not newer than the
-- published one.
--
-- KEYS[1] epochs   hash    worker -> newest epoch KEYS[2] weights  string  the newest announcement,
-- JSON KEYS[3] news     stream  of weights, one entry ARGV[1] worker ARGV[2] epoch of the caller
-- ARGV[3] policy version ARGV[4] announcement, JSON returns {newest epoch of the caller's worker,
-- version that was published before (-1: none), 1 when this one is now}
local newest = redis.call('HGET', KEYS[1], ARGV[1]) or '0'
local before = -1
local present = redis.call('GET', KEYS[2])
if present then
  before = cjson.decode(present)['policy_version']
end
if newest == ARGV[2] and present == ARGV[4] then
  return {tonumber(newest), before, 1} -- a repeat, because the first answer was lost
end
if newest ~= ARGV[2] or tonumber(ARGV[3]) <= before then
  return {tonumber(newest), before, 0}
end
redis.call('DEL', KEYS[2]) -- first, for a server at its memory limit (see register.lua)
redis.call('SET', KEYS[2], ARGV[4])
redis.call('XADD', KEYS[3], 'MAXLEN', 1, '*', 'policy_version', ARGV[3])
return {tonumber(newest), before, 1}
