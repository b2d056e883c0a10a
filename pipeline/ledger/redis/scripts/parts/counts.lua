-- counts.lua: the counters. Changes wait until the transition is over, so that a batch of units
-- that ends is counted in one go; pipeline.ledger.redis.scripts then calls write_counts.
--
-- Uses     beginning

local counted = {}
local function count(name, by) counted[name] = (counted[name] or 0) + by end
-- functions that are called when the transition is over; most have none
local finishing
local before = {}
local function read_counters(...)
  for i, value in ipairs(call('HMGET', COUNTERS, ...)) do before[select(i, ...)] = integer(value or nil) end
end
local function counter(name)
  if not before[name] then read_counters(name) end
  return before[name] + (counted[name] or 0)
end
local function write_counts()
  for name, by in pairs(counted) do
    if by ~= 0 then call('HINCRBY', COUNTERS, name, by) end
  end
  for _, finish in ipairs(finishing or {}) do finish() end
end
