-- announce_weights.lua: publish a policy version, unless the caller is fenced or the version is not
-- newer than the published one.
--
-- Uses     epochs telling
-- KEYS[1]  epochs        hash     worker -> newest epoch
-- KEYS[2]  weights       string   the newest announcement, JSON
-- KEYS[3]  weights_news  stream   one entry
-- ARGV[1]  worker        text
-- ARGV[2]  epoch         integer  of the caller
-- ARGV[3]  version       integer
-- ARGV[4]  announcement  bytes    JSON
-- Returns  { newest epoch of the caller's worker, version published before (-1 if none), 1 when this
--          one is now published }

local epochs, weights, weights_news = KEYS[1], KEYS[2], KEYS[3]
local worker, epoch, version, announcement = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local newest = newest_epoch(epochs, worker)
local before = -1
local present = redis.call('GET', weights)
if present then
  local is_read, known = pcall(cjson.decode, present)
  local number = is_read and type(known) == 'table' and known['policy_version']
  before = type(number) == 'number' and number or -1
end
if newest == epoch and present == announcement then
  return { tonumber(newest) or 0, before, 1 } -- a repeat, since the first answer was lost
end
if newest ~= epoch or tonumber(version) <= before then
  return { tonumber(newest) or 0, before, 0 }
end
redis.call('DEL', weights) -- first, for a server at its memory limit (see register.lua)
redis.call('SET', weights, announcement)
tell(weights_news, 'policy_version', version)
return { tonumber(newest) or 0, before, 1 }
