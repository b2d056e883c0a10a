-- recover.lua: settle a checkpoint's claims, keep a snapshot's, and return the units of all others.
--
-- Uses     beginning leaving ready requests versions
-- Writes   claims claim:* ready ready_age counters tallies asked:<who>, and all that settled units leave
--          behind
-- ARGV[4]  request  integer  its number
-- ARGV[5]  kept     integer  how many of the claims stay claimed: the first ones
-- ARGV[6..]  claims  text  whose effect the snapshot, then those whose effect the checkpoint holds
-- Returns  how many units came back

local request, kept = ARGV[4], tonumber(ARGV[5])
local order = order_of('recover', request)
if order == 'late' then return LATE end
if order == 'again' then return integer(call('HGET', ASKED, 'recover:returned')) end
allow_growth()
local stays, applied, returned = {}, {}, 0
local versions = {}
local stored = call('HGETALL', P .. 'claims')
for place = 1, #stored, 2 do versions[stored[place]] = tonumber(stored[place + 1]) end
-- those of the checkpoint in its order, as they would have been settled
local claims = {}
for i = 6, #ARGV do
  local id = ARGV[i]
  if i < 6 + kept then
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
  local made = updates_in(versions[id])
  local units = call('ZRANGE', P .. 'claim:' .. id, 0, -1, 'WITHSCORES')
  for i = 1, #units, 2 do
    if applied[id] then
      leaving().unit(units[i], nil, made)
    else
      make_ready(units[i], units[i + 1], call('HGET', unit_key(units[i]), 'oldest'))
      returned = returned + 1
    end
  end
  call('DEL', P .. 'claim:' .. id)
  call('HDEL', P .. 'claims', id)
end
remember('recover', request, 'recover:returned', returned)
return returned
