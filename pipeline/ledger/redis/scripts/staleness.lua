-- staleness.lua: units by staleness: ready and running ones counted by range, claimed ones by a bounded
-- walk, trained and dropped ones from tallies.
--
-- Uses     beginning counts ready tallies versions
-- Reads    settings counters ready running ready_age running_age claims claim:* tallies, and units of claims
-- ARGV[4]  most     integer  claimed units whose age is read
-- Returns  { unit, version, eta, ready, running, unbegun, claimed, claimed units, tallies }; ready,
--          running and claimed as { staleness, units, ... }, tallies as { name, number, ... }

local most = tonumber(ARGV[4])
local behind = tallies().behind

local function rows(found)
  local flat = {}
  for staleness, number in pairs(found) do
    flat[#flat + 1] = staleness
    flat[#flat + 1] = number
  end
  return flat
end

-- Ages are between the learner's version and eta below it, unless the learner went back.
local function by_age(index)
  local found, from = {}, '-inf'
  for _ = 0, tallies().MAX_STALENESS do
    local first = call('ZRANGEBYSCORE', P .. index, from, '+inf', 'WITHSCORES', 'LIMIT', 0, 1)
    if not first[2] then break end
    local age = tonumber(first[2])
    local of_age = behind(age)
    found[of_age] = (found[of_age] or 0) + call('ZCOUNT', P .. index, age, age)
    from = string.format('(%.0f', age)
  end
  return rows(found)
end

local claimed, units, looked = {}, 0, 0
local claims = call('HGETALL', P .. 'claims')
for i = 1, #claims, 2 do
  local key, made = P .. 'claim:' .. claims[i], updates_in(tonumber(claims[i + 1]))
  units = units + call('ZCARD', key)
  for _, name in ipairs(looked < most and call('ZRANGE', key, 0, most - looked - 1) or {}) do
    looked = looked + 1
    local oldest = call('HGET', unit_key(name), 'oldest')
    if oldest then
      local of_age = behind(oldest, made)
      claimed[of_age] = (claimed[of_age] or 0) + 1
    end
  end
end

return {
  S.unit, counter('version'), S.eta, by_age('ready_age'), by_age('running_age'),
  call('ZCARD', P .. 'running') - call('ZCARD', P .. 'running_age'), rows(claimed), units, call('HGETALL', P .. 'tallies'),
}
