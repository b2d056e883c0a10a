-- totals.lua: read the counters that bound staleness and describe progress.
--
-- Uses     beginning counts credit prompts
-- Reads    settings counters ready running paused
-- Returns  { version, used, limit, ready units, running units, groups admitted, tokens generated,
--          tokens trained, closed, exhausted, waits unflushed, { reason, groups dropped, ... },
--          trajectories admitted, credit trained, finished admitted, finished trained,
--          { since, by, reason } of the pause, each nil without one }

local c = call('HMGET', COUNTERS, 'version', 'used', 'groups:admitted', 'tokens:admitted', 'tokens:trained', 'closed',
  'trajectories:admitted', 'credit:trained', 'finished:admitted', 'finished:trained')
local dropped = {}
for _, reason in ipairs({ 'stale', 'no_signal', 'dead_letter', 'non_finite', 'cancelled', 'value_warmup',
  'rolled_back' }) do
  local number = counter('groups:dropped:' .. reason)
  if number > 0 then
    dropped[#dropped + 1] = reason
    dropped[#dropped + 1] = number
  end
end
local version, groups = integer(c[1]), integer(c[3])
return {
  version, integer(c[2]), credit_limit(), call('ZCARD', P .. 'ready'),
  call('ZCARD', P .. 'running') * WEIGHT, groups, integer(c[4]), integer(c[5]), c[6] and 1 or 0,
  is_exhausted() and 1 or 0, counter('unflushed'), dropped,
  integer(c[7]), integer(c[8]), integer(c[9]), integer(c[10]),
  call('HMGET', P .. 'paused', 'since', 'by', 'reason'),
}
