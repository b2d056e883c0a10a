-- milestones.lua: what was trained when a number of updates had been settled, so that going back can count
-- what it undoes.
--
-- Uses     beginning counts

local CURRENCIES = { 'credit', 'groups', 'trajectories', 'tokens' }
local MAX_MILESTONES = 1000

local function milestone(made, totals) return string.format('%d:%d:%d:%d:%d', made, unpack(totals)) end

local function milestone_parts(text)
  local totals = {}
  for number in string.gmatch(string.match(text, '^%d+:(.*)$'), '%d+') do totals[#totals + 1] = tonumber(number) end
  return totals
end

local function mark(made)
  local totals = {}
  for i, currency in ipairs(CURRENCIES) do totals[i] = counter(currency .. ':trained') end
  call('ZREMRANGEBYSCORE', P .. 'milestones', made, made)
  call('ZADD', P .. 'milestones', made, milestone(made, totals))
  call('ZREMRANGEBYRANK', P .. 'milestones', 0, -MAX_MILESTONES - 1)
end
