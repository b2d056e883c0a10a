-- resume_from.lua: record with which weights the learner continues, count what later updates had trained
-- as rolled back, and reopen admission.
--
-- Uses     beginning counts milestones requests
-- Writes   lineage milestones counters asked:<who>
-- ARGV[4]  version  integer  under which the weights are published
-- ARGV[5]  updates  integer  in the weights
-- ARGV[6]  request  integer  its number
-- Returns  credit of the trained units that are rolled back
-- Errors   UNMARKED: trained units would be rolled back, but their number is unknown; nothing has changed

local version, updates, request = tonumber(ARGV[4]), tonumber(ARGV[5]), ARGV[6]
local given_up, order = 0, order_of('resume_from', request)
if order == 'late' then return LATE end
if order == 'again' then return integer(call('HGET', ASKED, 'resume_from:given_up')) end
if call('ZCOUNT', P .. 'milestones', '(' .. updates, '+inf') > 0 then
  local known = call('ZRANGEBYSCORE', P .. 'milestones', updates, updates)[1]
  if not known and updates > 0 then
    return redis.error_reply('UNMARKED no batch was settled together with a checkpoint of ' .. updates .. ' updates')
  end
  allow_growth()
  local then_trained = milestone_parts(known or milestone(0, { 0, 0, 0, 0 }))
  for i, currency in ipairs(CURRENCIES) do
    local lost = counter(currency .. ':trained') - then_trained[i]
    count(currency .. ':trained', -lost)
    if currency == 'credit' then
      count('used', -lost)
      given_up = lost
    else
      count(currency .. ':dropped:rolled_back', lost)
    end
  end
  call('ZREMRANGEBYSCORE', P .. 'milestones', '(' .. updates, '+inf')
else
  allow_growth()
end
mark(updates)
call('ZREMRANGEBYSCORE', P .. 'lineage', version, '+inf')
call('ZADD', P .. 'lineage', version, string.format('%d:%d', version, updates))
call('HDEL', COUNTERS, 'closed')
call('HSET', COUNTERS, 'version', math.max(counter('version'), version))
remember('resume_from', request, 'resume_from:given_up', given_up)
return given_up
