-- counts.lua: the counters. They are written when the transition is over, so that a batch of units counts
-- in one go; pipeline.ledger.redis.scripts then calls write_counts.
--
-- Whatever changes a trajectory's work in flight, its stored tokens or its state for the value worker must
-- call has_moved, since an audit rereads what moved meanwhile.
--
-- Uses     beginning many

-- How many names `moved` keeps. It is trimmed at twice as many.
local MAX_MOVED = 32768

local counted = {}
local function count(name, by) counted[name] = (counted[name] or 0) + by end
-- functions to call when the transition is over; most transitions have none
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
