-- recover.lua: settle a checkpoint's claims, keep a snapshot's, and make the units of all others ready
-- again, one batch per call. A claim exists until its last unit is settled or ready: if the learner dies
-- between two calls, its successor does the rest.
--
-- Uses     beginning leaving ready requests versions
-- Writes   claims claim:* ready ready_age counters tallies asked:<who>, and what settling units writes
-- ARGV[4]  request  integer  its number
-- ARGV[5]  most     integer  units to make ready and chunks to remove; the last unit may exceed it
-- ARGV[6]  kept     integer  how many of the claims stay claimed: the first ones
-- ARGV[7..]  claims  text  those whose effect is in the snapshot, then those in the checkpoint
-- Returns  { how many units are ready again, 1 to call again or 0 }

local request, most, kept = ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[6])
local order = order_of('recover', request)
if order == 'late' then return LATE end
if order == 'again' then return remembered('recover:returned', 'recover:more') end
allow_growth()
local stays, applied, returned, more = {}, {}, 0, 0
local versions = {}
local stored = call('HGETALL', P .. 'claims')
for place = 1, #stored, 2 do versions[stored[place]] = tonumber(stored[place + 1]) end
-- the checkpoint's claims in its order, as they would have been settled
local claims = {}
for i = 7, #ARGV do
  local id = ARGV[i]
  if i < 7 + kept then
    stays[id] = true
  else
    applied[id] = true
    if versions[id] then claims[#claims + 1] = id end
  end
end
for id in pairs(versions) do
  if not applied[id] and not stays[id] then claims[#claims + 1] = id end
end
for _, id in ipairs(claims) do
  local made, key = updates_in(versions[id]), P .. 'claim:' .. id
  local units = call('ZRANGE', key, 0, most, 'WITHSCORES')
  for i = 1, #units, 2 do
    if returned + leaving().num_chunks() >= most then
      more = 1
      break
    end
    if applied[id] then
      leaving().unit(units[i], nil, made)
    else
      make_ready(units[i], units[i + 1], call('HGET', unit_key(units[i]), 'oldest'))
      returned = returned + 1
    end
    call('ZREM', key, units[i])
  end
  if call('EXISTS', key) == 1 then more = 1 end
  if more == 1 then break end
  call('HDEL', P .. 'claims', id)
end
remember('recover', request, 'recover:returned', returned, 'recover:more', more)
return { returned, more }
