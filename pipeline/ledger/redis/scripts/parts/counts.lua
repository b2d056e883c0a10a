-- counts.lua: the counters. Changes wait until the transition is over, so that a batch of units
-- that ends is counted in one go; pipeline.ledger.redis.scripts then calls write_counts.
--
-- Whatever changes a trajectory's work in flight, its stored tokens or its place among those that
-- the value worker trains on, calls has_moved: an audit reads again what moved while it went on.
--
-- Uses     beginning many

-- Names that `moved` keeps. It is cut when there are twice as many.
local MAX_MOVED = 32768

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
local moved = {}
local function has_moved(tid) moved[#moved + 1] = tid end
local function write_counts()
  if #moved > 0 then
    count('moved', #moved)
    call_many(moved, 'LPUSH', P .. 'moved')
    if call('LLEN', P .. 'moved') > 2 * MAX_MOVED then call('LTRIM', P .. 'moved', 0, MAX_MOVED - 1) end
  end
  for name, by in pairs(counted) do
    if by ~= 0 then call('HINCRBY', COUNTERS, name, by) end
  end
  for _, finish in ipairs(finishing or {}) do finish() end
end
